"""How anything is measured: processes, clocks, memory, operations, float64 truth."""
