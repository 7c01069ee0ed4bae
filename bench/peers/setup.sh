#!/usr/bin/env bash
# setup.sh PEERS RECIPE: the peers' environments and models, under the directory PEERS; what is there already stays.
# RECIPE: its model is a GGUF file in Q4_1, which llama.cpp runs as it is; the others convert it. Needs cmake, ninja, a C++
# compiler, 4 GB of disk and ten minutes of two cores. A peer that cannot be made is left out, with its reason in
# PEERS/NAME.log; the others go on. MODEL.seconds beside a model says how long its conversion took.
set -uo pipefail
mkdir -p "$1/models"
PEERS=$(cd "$1" && pwd)
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
OURS=${OURS:-$HERE/../../.venv/bin/python}
RECIPE=$(realpath "$2")
GGUF=$("$OURS" "$HERE/checkpoint.py" "$RECIPE") || exit
LLAMA=0.3.36
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

environment() { [ -x "$PEERS/$1/bin/python" ] || "$PYTHON" -m venv "$PEERS/$1"; }
install() { local name=$1 && shift && "$PEERS/$name/bin/pip" install --quiet "$@"; }
# timed MODEL COMMAND…: the command makes $MODEL, all of it or nothing
timed() {
  local model=$1 begun=$EPOCHREALTIME && shift && rm -rf "$model.partial"
  "$@" && mv "$model.partial" "$model" && echo "$EPOCHREALTIME $begun" | awk '{printf "%.1f\n", $1 - $2}' > "$model.seconds"
}

llama_cpp() {
  local sources=$PEERS/llama_cpp_python-$LLAMA
  environment llama && install llama numpy jinja2 diskcache typing-extensions scikit-build-core || return
  if [ ! -d "$sources" ]; then
    "$PEERS/llama/bin/pip" download --quiet --no-deps --no-build-isolation --no-binary llama-cpp-python \
      --dest "$PEERS" "llama-cpp-python==$LLAMA" && tar -x -f "$sources.tar.gz" -C "$PEERS" || return
  fi
  cmake -G Ninja -S "$sources/vendor/llama.cpp" -B "$sources/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF &&
    nice cmake --build "$sources/build" --target llama llama-quantize || return
  ln -sfn "$sources" "$PEERS/llama.cpp" && ln -sfn "$GGUF" "$PEERS/models/llama-q4_1.gguf"
  local model=$PEERS/models/llama-q4_0.gguf
  [ -e "$model" ] || timed "$model" "$sources/build/bin/llama-quantize" --allow-requantize "$GGUF" "$model.partial" Q4_0
}

hf_directory() {
  [ -d "$PEERS/models/hf" ] || timed "$PEERS/models/hf" "$OURS" "$HERE/checkpoint.py" "$RECIPE" "$PEERS/models/hf.partial"
}

ort_genai() {
  local model=$PEERS/models/ort-int4
  environment ort && install ort onnxruntime-genai==0.18.0 'torch==2.13.*' 'transformers>=5,<6' onnx onnx-ir || return
  [ -d "$model" ] || timed "$model" "$PEERS/ort/bin/python" -m onnxruntime_genai.models.builder \
    -i "$PEERS/models/hf" -o "$model.partial" -p int4 -e cpu -c "$PEERS/cache" \
    --extra_options int4_accuracy_level=4 int4_block_size=32
}

openvino() { # a hidden size of 576 is no multiple of 128, the default group; torchvision breaks the import
  local model=$PEERS/models/openvino-int4
  environment openvino && install openvino 'torch==2.13.*' 'openvino-genai==2026.4.*' 'optimum-intel[openvino]' nncf &&
    "$PEERS/openvino/bin/pip" uninstall --quiet --yes torchvision || return
  [ -d "$model" ] || timed "$model" "$PEERS/openvino/bin/optimum-cli" export openvino -m "$PEERS/models/hf" \
    --task text-generation-with-past --weight-format int4 --sym --group-size 64 --ratio 1.0 --all-layers "$model.partial"
}

for peer in llama_cpp hf_directory ort_genai openvino; do
  echo "$peer: $PEERS/$peer.log"
  $peer > "$PEERS/$peer.log" 2>&1 || { echo "$peer failed:" && tail -n 3 "$PEERS/$peer.log"; }
done
