"""The settings of an engine by feature, each declared once."""
