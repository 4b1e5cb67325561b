"""MLServer's model: texts come and answers go as V2 inference requests; its adaptive batching joins them by row."""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.peers.servers.common import Model, Settings


class Sentiment(MLModel):
    """A call has one or more texts in its first input."""

    async def load(self) -> bool:
        """Load the model (in each worker)."""
        self.answers = Model(Settings.read())
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer the texts."""
        texts = StringCodec.decode_input(payload.inputs[0])
        answers = self.answers.answer(texts)
        scores = np.array([[answer["score"]] for answer in answers])
        return InferenceResponse(
            model_name=self.name,
            outputs=[
                StringCodec.encode_output("label", [answer["label"] for answer in answers]),
                NumpyCodec.encode_output("score", scores),
            ],
        )
