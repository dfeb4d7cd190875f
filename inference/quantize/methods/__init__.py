"""One method a module: how numbers become groups, or what is done to a layer before."""
