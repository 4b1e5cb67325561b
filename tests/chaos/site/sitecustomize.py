"""Plants one fault into a door's process as it starts: only a chaos run puts this folder on the path."""

import os
import sys

if (name := os.environ.get("CHAOS_PLANTED")) and {"gateway", "batch_consumer"} & set(sys.orig_argv):
    from tests.chaos.planted import plant

    plant(name)
