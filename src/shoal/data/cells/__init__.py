"""Single cells: `.h5ad` files to sequences of gene tokens, one cell per sequence. Imports h5py only when a file is read."""
