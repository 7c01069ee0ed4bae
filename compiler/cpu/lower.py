"""Map the fused graph onto the kernels of plugins/cpu. Anything else in the graph is an error, never skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from plankiln.compiler.blocks import BlockReference
from plankiln.compiler.cpu.program import Buffer, Call, Int8, Program, Weight
from plankiln.compiler.formats import KV_ONNX, Element, KvFormat
from plankiln.compiler.matrices import matrix_behind
from plankiln.errors import ExportError
from plankiln.plugins import fused_ops, quantized_ops
from plankiln.plugins.paged_attention import schema
from plankiln.plugins.paged_attention.onnx_function import storage_of
from plankiln.quantize.formats import BlockFormat, Fp8Format


@dataclass(frozen=True)
class View:
    """Columns offset … offset+width of what the buffer holds since its `version`-th definition."""

    buffer: Buffer
    offset: int
    width: int
    version: int


def lower(model: ir.Model, name: str) -> Program:
    """Lower a graph that has been through every pass. Raises ExportError naming the node that has no kernel."""
    return _Lowering(model, name).run()


class _Lowering:
    def __init__(self, model: ir.Model, name: str) -> None:
        self.graph = model.graph
        self.name = name
        self.calls: list[Call] = []
        self.views: dict[ir.Value, View] = {}
        self.buffers: dict[str, Buffer] = {}
        self.versions: dict[Buffer, int] = {}
        self.prescaled: dict[ir.Value, tuple[ir.Value, Weight]] = {}
        self.layers = 0
        self.heads = self.kv_heads = self.head_dim = self.vocab = self.max_context = 0
        self.kv_format: KvFormat = "fp32"
        self.handlers: dict[str, Callable[[ir.Node], None]] = {
            "Gather": self.gather,
            "Cast": self.cast,
            "RMSNormalization": self.norm,
            fused_ops.ADD_RMS_NORMALIZATION: self.add_norm,
            "MatMul": self.linear,
            "Add": self.bias,
            "Split": self.split,
            "Reshape": self.reshape,
            schema.OP_TYPE: self.attention,
            fused_ops.SILU_MUL: self.silu_mul,
            "DequantizeLinear": self.cast,
            quantized_ops.DEQUANTIZE_BLOCKS: self.cast,
            quantized_ops.DYNAMIC_QUANTIZE: self.quantize,
            quantized_ops.DYNAMIC_QUANTIZE_FLOAT8: self.quantize_float8,
            "QuantizeLinear": self.quantize_static,
            "Mul": self.prescale,
            "Concat": self.concat,
        }

    def run(self) -> Program:
        for node in self.graph:
            handler = self.handlers.get(node.op_type)
            if handler is None:
                raise self.no_kernel(node)
            handler(node)
        return Program(
            name=self.name,
            calls=tuple(self.calls),
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
            max_context=self.max_context,
            kv_format=self.kv_format,
        )

    def no_kernel(self, node: ir.Node, why: str = "") -> ExportError:
        return ExportError(
            f"the CPU target has no kernel for `{node.op_type}`{why}",
            f"node `{node.name}`",
            "run the passes first; if they did run, this model needs a kernel that does not exist yet",
        )

    # -- values ----------------------------------------------------------------------------------------------------

    def value(self, node: ir.Node, index: int) -> ir.Value:
        value = node.inputs[index]
        if value is None:
            raise self.no_kernel(node, f" without input {index}")
        return value

    def view(self, node: ir.Node, index: int) -> View:
        value = self.value(node, index)
        view = self.views.get(value)
        if view is None or view.version != self.versions[view.buffer]:
            raise self.no_kernel(node, f" on `{value.name}`" + (", which was overwritten" if view else ""))
        return view

    def buffer(self, node: ir.Node, index: int) -> Buffer:
        """An input that must be a whole buffer."""
        view = self.view(node, index)
        if view.offset or view.width != view.buffer.width:
            raise self.no_kernel(node, " on some columns of a tensor")
        return view.buffer

    def define(self, value: ir.Value, name: str, width: int, element: Element | Int8 = "float32") -> Buffer:
        """The buffer that holds `value` from here on. Layers share buffers; a name with two shapes gets a suffix."""
        buffer = Buffer(name, width, element)
        if self.buffers.setdefault(name, buffer) != buffer:
            return self.define(value, f"{name}_{width}", width, element)
        self.versions[buffer] = self.versions.get(buffer, 0) + 1
        self.views[value] = View(buffer, 0, width, self.versions[buffer])
        return buffer

    def element(self, value: ir.Value) -> Element | Int8:
        """What every reader of the value turns it into: then the producer writes that. Else float32."""

        def reads(node: ir.Node) -> Element | Int8:
            if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.BFLOAT16:
                return "bfloat16"
            if node.op_type == quantized_ops.DYNAMIC_QUANTIZE:
                return Int8(node.attributes["group"].as_int())
            return self.element(node.outputs[0]) if node.op_type == "Gather" else "float32"

        kinds = {reads(use.node) for use in value.uses()}
        return kinds.pop() if len(kinds) == 1 else "float32"

    def weight(self, node: ir.Node, index: int) -> Weight:
        """The [N, K] matrix behind an input, transposed or not, in the format it is stored in."""
        value = self.value(node, index)
        reference = matrix_behind(value)
        if reference is None:
            raise self.no_kernel(node, f" by `{value.name}`, which is not a checkpoint's matrix")
        name = "+".join(part.tensor for part in reference.parts)
        n, k = reference.shape[::-1] if reference.transposed else reference.shape
        if isinstance(reference, BlockReference):
            return Weight(name, "tiles", reference.format, n, k, reference.blocks, reference.parts, reference.clip)
        return Weight(name, "tiles", reference.dtype, n, k, reference.rows, reference.parts)

    def vector(self, value: ir.Value) -> Weight:
        """A float32 initializer kept as it is: a norm's weight, a bias, a RoPE table."""
        tensor = value.const_value
        if tensor is None:
            raise ExportError("an operand is not a constant", f"value `{value.name}`")
        rows, *columns = [n for n in tensor.shape if isinstance(n, int)] or [1]
        return Weight(
            value.name or "",
            "vector",
            "float32",
            rows,
            columns[0] if columns else 1,
            lambda: np.asarray(tensor.numpy(), np.float32),
        )

    def emit(
        self,
        kernel: str,
        write: Buffer,
        *read: Buffer,
        weights: tuple[Weight, ...] = (),
        **params: int | float,
    ) -> None:
        self.calls.append(Call(kernel, (write,), read, weights, tuple(params.items())))

    # -- one method per op -----------------------------------------------------------------------------------------

    def gather(self, node: ir.Node) -> None:
        rows, output = self.value(node, 1), node.outputs[0]
        if rows.name == "input_ids":
            table = self.weight(node, 0)
            self.emit("embed", self.define(output, "hidden", table.k), weights=(table,))
        elif rows.name == "logit_rows":
            buffer = self.buffer(node, 0)
            self.emit("gather_rows", self.define(output, "wanted", buffer.width, buffer.element), buffer)
        else:
            raise self.no_kernel(node, f" by `{rows.name}`")

    def cast(self, node: ir.Node) -> None:
        """Casts of weights and back to float32 have no kernel of their own: linears read what is stored."""
        source = self.value(node, 0)
        if source.const_value is None:
            view = self.view(node, 0)
            narrow = "to" in node.attributes and node.attributes["to"].as_int() == ir.DataType.BFLOAT16
            if narrow and view.buffer.element == "float32":
                buffer = self.buffer(node, 0)
                made = self.define(node.outputs[0], f"{buffer.name}_bf16", buffer.width, "bfloat16")
                self.emit("narrow_rows", made, buffer)
                return
            self.views[node.outputs[0]] = view

    def prescale(self, node: ir.Node) -> None:
        """Columns times constants: part of the rounding that follows, or a kernel of its own where none does."""
        value, output = self.value(node, 0), node.outputs[0]
        factors = self.vector(self.value(node, 1))
        rounds = (quantized_ops.DYNAMIC_QUANTIZE, quantized_ops.DYNAMIC_QUANTIZE_FLOAT8, "QuantizeLinear")
        if all(use.node.op_type in rounds for use in output.uses()):
            self.prescaled[output] = value, factors
            return
        source = self.buffer(node, 0)
        self.emit("scale_rows", self.define(output, f"{source.name}_scaled", source.width), source, weights=(factors,))

    def quantize(self, node: ir.Node) -> None:
        """Activations to int8, a scale for each group: nothing to do where their producer wrote them so."""
        kind = Int8(node.attributes["group"].as_int())
        view = self.views.get(self.value(node, 0))
        if view and view.buffer.element == kind:
            self.views[node.outputs[0]] = self.view(node, 0)
            return
        self._round(node, "quantize_rows", kind, ())

    def quantize_static(self, node: ir.Node) -> None:
        """Activations by one scale, to int8 or e4m3."""
        scale = self.vector(self.value(node, 1))
        if node.outputs[0].dtype == ir.DataType.FLOAT8E4M3FN:
            self._round(node, "round_e4m3_rows", "float32", (scale,))
        else:
            self._round(node, "quantize_rows", None, (scale,))

    def quantize_float8(self, node: ir.Node) -> None:
        """Activations to e4m3, a scale for each row."""
        self._round(node, "round_e4m3_rows", "float32", ())

    def _round(self, node: ir.Node, kernel: str, element: Element | Int8 | None, scale: tuple[Weight, ...]) -> None:
        """element None: int8 with one group of all columns."""
        value = self.value(node, 0)
        value, factors = self.prescaled.get(value, (value, None))
        view = self.views.get(value)
        if view is None or view.version != self.versions[view.buffer] or view.width != view.buffer.width:
            raise self.no_kernel(node, f" on `{value.name}`")
        source = view.buffer
        suffix = "e4m3" if element == "float32" else "int8"
        made = self.define(node.outputs[0], f"{source.name}_{suffix}", source.width, element or Int8(source.width))
        weights = (*((factors,) if factors else ()), *scale)
        self.emit(kernel, made, source, weights=weights, prescale=int(factors is not None), static=len(scale))

    def norm(self, node: ir.Node) -> None:
        view, weight = self.view(node, 0), self.vector(self.value(node, 1))
        epsilon = node.attributes["epsilon"].as_float()
        if view.width != view.buffer.width or view.width != weight.n:  # query-key normalization, in place
            heads, left = divmod(view.width, weight.n)
            if left:
                raise self.no_kernel(node, f" of {weight.n} in rows of {view.width}")
            self.emit(
                "head_norm",
                view.buffer,
                view.buffer,
                weights=(weight,),
                offset=view.offset,
                heads=heads,
                dim=weight.n,
                epsilon=epsilon,
            )
            self.views[node.outputs[0]] = view
            return
        source, output = self.buffer(node, 0), node.outputs[0]
        normed = self.define(output, "normed", weight.n, self.element(output))
        self.emit("rms_norm", normed, source, weights=(weight,), epsilon=epsilon)

    def add_norm(self, node: ir.Node) -> None:
        x, residual, weight = self.buffer(node, 0), self.buffer(node, 1), self.vector(self.value(node, 2))
        normed, total = node.outputs
        out = self.define(normed, "normed", weight.n, self.element(normed))
        self.define(total, residual.name, residual.width)
        epsilon = node.attributes["epsilon"].as_float()
        self.calls.append(Call("add_rms_norm", (out, residual), (residual, x), (weight,), (("epsilon", epsilon),)))

    def linear(self, node: ir.Node) -> None:
        x, weight = self.buffer(node, 0), self.weight(node, 1)
        if isinstance(weight.format, Fp8Format):
            fits = x.element == "float32"
        elif isinstance(weight.format, BlockFormat):
            fits = x.element in ("float32", Int8(weight.format.group))
        else:
            fits = x.element == weight.format
        if not fits:
            raise self.no_kernel(node, f" of {x.element} activations by {weight.format} weights")
        output = node.outputs[0]
        if output.name == "logits":
            self.vocab = weight.n
        name = "logits" if output.name == "logits" else _role(output, weight)
        view = self.columns(output, name, weight.n)
        self.emit("linear", view.buffer, x, weights=(weight,), offset=view.offset)

    def columns(self, output: ir.Value, name: str, width: int) -> View:
        """Where a linear's result goes: a buffer of its own, or columns of the one that a Concat makes of several."""
        concat = _concat_of(output)
        if concat is None:
            self.define(output, name, width)
            return self.views[output]
        whole, before = concat.outputs[0], 0
        parts = [self.value(concat, i) for i in range(len(concat.inputs))]
        ends = [output, *(use.node.outputs[0] for use in output.uses())]
        index = next(i for i, part in enumerate(parts) if part in ends)
        widths = [part.shape[1] for part in parts if part.shape is not None]
        before = sum(size for size in widths[:index] if isinstance(size, int))
        if whole not in self.views:
            self.define(whole, name, sum(size for size in widths if isinstance(size, int)))
        view = self.views[whole]
        self.views[output] = View(view.buffer, before, width, view.version)
        return self.views[output]

    def concat(self, node: ir.Node) -> None:
        if node.outputs[0] not in self.views:
            raise self.no_kernel(node, " of anything but linears")

    def bias(self, node: ir.Node) -> None:
        constant = 1 if self.value(node, 1).const_value is not None else 0
        view, weight = self.view(node, 1 - constant), self.vector(self.value(node, constant))
        self.emit("add_bias", view.buffer, view.buffer, weights=(weight,), offset=view.offset, width=view.width)
        self.views[node.outputs[0]] = view

    def split(self, node: ir.Node) -> None:
        view = self.view(node, 0)
        sizes = self.value(node, 1).const_value
        if sizes is None:
            raise self.no_kernel(node, " into unknown sizes")
        offset = view.offset
        for output, width in zip(node.outputs, sizes.numpy().tolist(), strict=True):
            self.views[output] = View(view.buffer, offset, width, view.version)
            offset += width

    def reshape(self, node: ir.Node) -> None:
        self.views[node.outputs[0]] = self.view(node, 0)

    def attention(self, node: ir.Node) -> None:
        q, k, v = (self.view(node, i) for i in range(3))
        a = node.attributes
        heads, kv_heads = a["num_heads"].as_int(), a["kv_num_heads"].as_int()
        dim = q.width // heads
        if a["softcap"].as_float() or not a["do_rotary"].as_int():
            raise self.no_kernel(node, " with softcap" if a["softcap"].as_float() else " without RoPE in the node")
        if not q.buffer == k.buffer == v.buffer:
            raise self.no_kernel(node, " on separate query, key and value")
        if dim % 2 or dim > 256:
            raise self.no_kernel(node, f" with head size {dim} (even, at most 256)")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim
        operands = self.attention_operands(node)
        tables = self.vector(operands["cos_cache"]), self.vector(operands["sin_cache"])
        scales = tuple(self.vector(operands[name]) for name in ("k_scale", "v_scale") if name in operands)
        if self.kv_format != "fp8":  # one layer with scales other than 1 makes it that
            self.kv_format = self.kv_format_of(node, scales)
        self.max_context = tables[0].n
        layer = self.layers
        self.layers += 1
        self.emit(
            "rope_and_cache",
            q.buffer,
            q.buffer,
            weights=(*tables, *scales),
            layer=layer,
            q=q.offset,
            k=k.offset,
            v=v.offset,
            scale=a["scale"].as_float(),
        )
        element = self.element(node.outputs[0])
        if isinstance(element, Int8):  # its units are heads, which need not be whole groups
            element = "float32"
        attended = self.define(node.outputs[0], "attended", q.width, element)
        window = a["local_window_size"].as_int()
        self.emit("attention", attended, q.buffer, layer=layer, q=q.offset, window=window, weights=scales[1:])

    def attention_operands(self, node: ir.Node) -> dict[str, ir.Value]:
        """The node's inputs by their names in the schema."""
        storage = storage_of(self.value(node, 3).dtype)
        inputs = schema.inputs(do_rotary=True, storage=storage)
        return {operand.name: self.value(node, i) for i, operand in enumerate(inputs)}

    def kv_format_of(self, node: ir.Node, scales: tuple[Weight, ...]) -> KvFormat:
        """The cache's format. Scales of 1 are those of fp8_cast: a checkpoint's own never are."""
        dtype = self.value(node, 3).dtype
        if scales:
            return "fp8_cast" if all(np.all(scale.read() == 1.0) for scale in scales) else "fp8"
        return next(name for name, known in KV_ONNX.items() if known == dtype)

    def silu_mul(self, node: ir.Node) -> None:
        gate_up = self.buffer(node, 0)
        output = node.outputs[0]
        activated = self.define(output, "activated", gate_up.width // 2, self.element(output))
        self.emit("silu_mul", activated, gate_up)


def _concat_of(output: ir.Value) -> ir.Node | None:
    """The Concat that puts a linear's result, with its bias, beside others'."""
    uses = [use.node for use in output.uses()]
    if len(uses) == 1 and uses[0].op_type == "Add" and any(v is not None and v.const_value for v in uses[0].inputs):
        uses = [use.node for use in uses[0].outputs[0].uses()]
    return uses[0] if len(uses) == 1 and uses[0].op_type == "Concat" else None


def _role(output: ir.Value, weight: Weight) -> str:
    """What a linear layer's result is called in the generated code, from who reads it."""
    concat = _concat_of(output)
    output = concat.outputs[0] if concat else output
    readers = {use.node.op_type for use in output.uses()}
    if "Add" in readers:
        readers |= {use.node.op_type for add in output.uses() for use in add.node.outputs[0].uses()}
    if "Split" in readers:
        return "qkv"
    if fused_ops.SILU_MUL in readers:
        return "gate_up"
    return "projected" if fused_ops.ADD_RMS_NORMALIZATION in readers else f"linear_{weight.n}"
