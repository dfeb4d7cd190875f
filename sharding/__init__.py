"""Mesh, logical-axis rules and partition specs: what maps the names in `ParamInfo` to devices."""
