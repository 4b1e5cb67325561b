"""A Triton Python model for tests: its faults are chosen by words in a row (``tests.stubs`` fills in their ids)."""

import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils

WORD_IDS = {}
SLEEP_S = 2.0


class TritonPythonModel:
    """Logits from the row's own ids alone, so that a neighbour's answer can be checked."""

    def execute(self, requests):
        """Answer each request; FAIL fails the whole request, DIE the whole process."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
        mask = pb_utils.get_input_tensor_by_name(request, "attention_mask").as_numpy()
        present = {fault for fault, word in WORD_IDS.items() if ((ids == word) & (mask == 1)).any()}
        if "SLEEP" in present:
            time.sleep(SLEEP_S)
        if "DIE" in present:
            os._exit(1)
        if "FAIL" in present:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("secret-inner-words: this row failed"))
        logits = np.stack([self._row(*row) for row in zip(ids, mask, strict=True)])
        return pb_utils.InferenceResponse([pb_utils.Tensor("logits", logits)])

    @staticmethod
    def _row(ids, mask):
        if WORD_IDS["NAN"] in ids:
            return np.array([np.nan, 1.0], dtype=np.float32)
        if WORD_IDS["INF"] in ids:
            return np.array([0.0, np.inf], dtype=np.float32)
        own = ids[mask == 1]
        value = (int((own * np.arange(1, len(own) + 1)).sum()) % 4001 - 2000) / 1000
        return np.array([-value, value], dtype=np.float32)
