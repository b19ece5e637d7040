"""Facts: accelerators, links, and the sizes of well-known models. Data and lookups only."""
