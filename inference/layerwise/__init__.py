"""A model run and written a layer at a time, in memory for one of them."""
