"""Import this before transformers: it tells the Hugging Face libraries to stay off the network.

They read these variables once, when they are first imported. `shoal download` is the one command that does not.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
