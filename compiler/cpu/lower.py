"""Map the fused graph onto the kernels of plugins/cpu. Anything else in the graph is an error, never skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from plankiln.compiler.blocks import BlockReference
from plankiln.compiler.cpu.program import Buffer, Call, Int8, Program, Weight
from plankiln.compiler.formats import Element
from plankiln.compiler.matrices import matrix_behind
from plankiln.errors import ExportError
from plankiln.plugins import fused_ops, quantized_ops
from plankiln.plugins.paged_attention import schema


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
        self.layers = 0
        self.heads = self.kv_heads = self.head_dim = self.vocab = self.max_context = 0
        self.kv_element: Element = "float32"
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
            kv_element=self.kv_element,
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
            return Weight(name, "tiles", reference.format, n, k, reference.blocks, reference.parts)
        return Weight(name, "tiles", reference.dtype, n, k, reference.rows, reference.parts)

    def vector(self, value: ir.Value) -> Weight:
        """A float32 initializer kept as it is: a norm's weight, a bias, a RoPE table."""
        tensor = value.const_value
        if tensor is None:
            raise ExportError("an operand is not a constant", f"value `{value.name}`")
        rows, *columns = (n for n in tensor.shape if isinstance(n, int))
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
        """Casts and dequantizations have no kernel of their own: producers round, linears read what is stored."""
        source = self.value(node, 0)
        if source.const_value is None:
            self.views[node.outputs[0]] = self.view(node, 0)

    def quantize(self, node: ir.Node) -> None:
        """Activations to int8: nothing to do where their producer wrote them so."""
        view, kind = self.view(node, 0), Int8(node.attributes["group"].as_int())
        if view.buffer.element == kind:
            self.views[node.outputs[0]] = view
            return
        source = self.buffer(node, 0)
        name = f"{source.name}_int8"
        self.emit("quantize_rows", self.define(node.outputs[0], name, source.width, kind), source)

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
        if isinstance(weight.format, str):
            fits = x.element == weight.format
        else:
            fits = x.element in ("float32", Int8(weight.format.group))
        if not fits:
            raise self.no_kernel(node, f" of {x.element} activations by {weight.format} weights")
        output = node.outputs[0]
        if output.name == "logits":
            self.vocab = weight.n
            name = "logits"
        else:
            name = _role(output, weight)
        self.emit("linear", self.define(output, name, weight.n), x, weights=(weight,))

    def bias(self, node: ir.Node) -> None:
        constant = 1 if self.value(node, 1).const_value is not None else 0
        buffer, weight = self.buffer(node, 1 - constant), self.vector(self.value(node, constant))
        self.emit("add_bias", self.define(node.outputs[0], buffer.name, buffer.width), buffer, weights=(weight,))

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
        cache = self.value(node, 3)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim
        self.kv_element = "bfloat16" if cache.dtype == ir.DataType.BFLOAT16 else "float32"
        tables = (self.vector(self.value(node, 8)), self.vector(self.value(node, 9)))
        self.max_context = tables[0].n
        layer = self.layers
        self.layers += 1
        self.emit(
            "rope_and_cache",
            q.buffer,
            q.buffer,
            weights=tables,
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
        self.emit("attention", attended, q.buffer, layer=layer, q=q.offset, window=window)

    def silu_mul(self, node: ir.Node) -> None:
        gate_up = self.buffer(node, 0)
        output = node.outputs[0]
        activated = self.define(output, "activated", gate_up.width // 2, self.element(output))
        self.emit("silu_mul", activated, gate_up)


def _role(output: ir.Value, weight: Weight) -> str:
    """What a linear layer's result is called in the generated code, from who reads it."""
    readers = {use.node.op_type for use in output.uses()}
    if "Add" in readers:
        readers |= {use.node.op_type for add in output.uses() for use in add.node.outputs[0].uses()}
    if "Split" in readers:
        return "qkv"
    if fused_ops.SILU_MUL in readers:
        return "gate_up"
    return "projected" if fused_ops.ADD_RMS_NORMALIZATION in readers else f"linear_{weight.n}"
