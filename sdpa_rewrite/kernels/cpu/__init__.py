"""The fused attention operator on CPU: Inductor's lowering, and the C++ that it emits."""
