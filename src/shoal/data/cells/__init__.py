"""Single cells: `.h5ad` files to sequences of genes, one cell each. h5py is imported when a file is opened."""
