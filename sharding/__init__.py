"""Mesh, logical-axis rules and parts of arrays: what maps the names in `ParamInfo` to devices."""
