"""`plankiln::PagedAttention`: its description (schema), its numpy oracle (reference), its ONNX body (onnx_function)."""
