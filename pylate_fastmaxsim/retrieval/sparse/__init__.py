"""An index of sparse vectors, and search without one."""
