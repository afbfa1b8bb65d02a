"""What engines compute of pictures, as they count it."""

from text_generation_inference.api.metric_series import Scalar
from text_generation_inference.types import PictureWork

# By field of `PictureWork`.
ENCODED = {
    "num_encoded": ("tgi_picture_encoded", "Pictures whose features were computed"),
    "num_features": ("tgi_picture_encoded_tokens", "Tokens in whose place features of these stand"),
    "num_pixels": ("tgi_picture_encoded_pixels", "Pixels of these, as the tower sees them"),
    "num_batches": ("tgi_picture_encoded_batches", "Batches in which they were computed"),
    "encode_seconds": ("tgi_picture_encode_seconds", "Time that computing them took"),
    "num_found": ("tgi_picture_features_found", "Pictures whose features were there, computed for another request"),
}


class EncodedSeries:
    def __init__(self, counters: dict[str, Scalar]) -> None:
        self._counters = counters  # by field of `PictureWork`

    @property
    def counters(self) -> list[Scalar]:
        return list(self._counters.values())

    def follow(self, work: PictureWork, replica: int) -> None:
        for field, counter in self._counters.items():
            counter.follow(getattr(work, field), replica)
