"""What is counted of pictures: `tgi_picture_*`, which only a model that sees has."""

from dataclasses import asdict

from text_generation_inference.api.metric_series import Scalar
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.pictures.loader import PictureCounts

# By field of `PictureCounts`.
FAMILIES = {
    "loaded": ("tgi_picture_count", "counter", "Pictures of requests"),
    "pixels": ("tgi_picture_pixels", "counter", "Pixels of these, as they came"),
    "hits": ("tgi_picture_hits", "counter", "Pictures whose bytes were known, so that none were decoded"),
    "refused": ("tgi_picture_refused", "counter", "Requests refused for a picture"),
    "fetched": ("tgi_picture_fetches", "counter", "Pictures fetched from other servers"),
    "fetched_bytes": ("tgi_picture_fetched_bytes", "counter", "Bytes of these"),
    "fetch_seconds": ("tgi_picture_fetch_seconds", "counter", "Time that fetching them took"),
    "prepare_seconds": (
        "tgi_picture_prepare_seconds",
        "counter",
        "Time for decoding and resizing",
    ),
    "workers_lost": ("tgi_picture_workers_lost", "counter", "Processes that ended while they decoded a picture"),
    "kept": ("tgi_picture_kept", "gauge", "Pictures kept for the engine"),
    "kept_bytes": ("tgi_picture_kept_bytes", "gauge", "Bytes of these"),
}


class PictureSeries:
    def __init__(self, metrics: Metrics) -> None:
        self._series: dict[str, Scalar] = {
            field: metrics.family(*about).keep(Scalar()) for field, about in FAMILIES.items()
        }
        about = ("tgi_picture_held", "gauge", "Pictures that requests hold, each as often as it is held")
        metrics.count_encoded()
        self._held: Scalar = metrics.family(*about).keep(Scalar())

    def show(self, counts: PictureCounts, num_held: int) -> None:
        self._held.set(num_held)
        values: dict[str, float] = asdict(counts)
        for field, series in self._series.items():
            series.set(round(values[field], 6))
