"""The core both doors share: rows become tensors, tensors become answers. It knows no HTTP and no Kafka."""

import os

# transformers otherwise tells every start that there is no PyTorch, on stderr, between our structured lines.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
