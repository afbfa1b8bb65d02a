"""What `tgi check` found out about a model, as data and as lines for a reader."""

import textwrap

import msgspec

from text_generation_inference.units import gigabytes

_NARROW = 60  # columns below which values stand under their names


class KvLayers(msgspec.Struct, frozen=True):
    """Layers that keep the same of a token."""

    kind: str  # "keys and values" or "latents"
    num_layers: int
    bytes_per_token: int  # all of these layers together
    window: int | None  # tokens further back are not read


class RankPart(msgspec.Struct, frozen=True):
    """What one rank has of a model that is split."""

    weight_bytes: int
    kv_bytes_per_token: int


class Report(msgspec.Struct, kw_only=True):
    """The answer. What could not be found out is None or empty."""

    model: str
    fits: bool = False
    problems: list[str] = []  # why it cannot be served
    notes: list[str] = []
    gpu: dict[str, str] = {}  # what is known of the GPU, where there is one
    architecture: str | None = None
    path: str | None = None  # the file that computes it, or "transformers"
    lost: list[str] = []  # what models with a file of their own have, and this one has not
    is_supported: bool = False  # the architecture, wherever it runs
    quantization: str | None = None  # as the checkpoint names it
    quantization_is_supported: bool = False
    parameters: int | None = None
    active_parameters: int | None = None  # those that a token meets, where there are experts
    experts: list[int] = []  # how many there are, and how many a token goes to
    dtype: str | None = None
    weight_bytes: int | None = None  # on the device, as it would be loaded
    weight_bytes_by_dtype: dict[str, int] = {}
    num_shard: int = 1
    ranks: list[RankPart] = []  # of a model that is split; weights and KV cache elsewhere are those of the largest
    kv_bytes_per_token: int | None = None  # on one rank
    kv_layers: list[KvLayers] = []
    window: int | None = None  # tokens that a request keeps in the KV cache, if not all
    partial_window: int | None = None  # tokens that it keeps in layers that read no more, where others keep all
    far_bytes_per_token: int | None = None  # on one rank, of a token behind that window
    free_bytes: int | None = None  # before loading
    kv_cache_tokens: int | None = None
    window_cache_tokens: int | None = None  # in layers that read a window, where these have blocks of their own
    limits: dict[str, int] = {}
    reasons: dict[str, str] = {}  # of the limits
    tokenizer: bool | None = None
    chat_template: bool | None = None
    stop_tokens: list[str] = []  # that end a text
    tool_calls: str | None = None  # the form in which it writes them
    thinking: str | None = None  # how it marks its thoughts
    picture_tokens: dict[str, int] = {}  # of a model that sees: what pictures of some sizes cost
    picture_bytes: int | None = None  # on one rank, for layers that read each picture by cross-attention
    picture_layers: int = 0  # how many those are
    max_cached_pictures: int | None = None  # that have room at a time
    download_bytes: int | None = None


def render(report: Report, width: int | None = None) -> str:
    """The report for a reader, in lines of at most `width` columns if that is given."""
    rows: list[tuple[str, str]] = []
    if report.gpu:
        rows.append(("GPU", f"{report.gpu['name']}, {report.gpu['memory']}, capability {report.gpu['capability']}"))
        rows.append(("", f"{report.gpu['features']}; the driver runs {report.gpu['driver']}"))
    if report.architecture is not None:
        known = "supported" if report.is_supported else "not supported"
        rows.append(("architecture", f"{report.architecture}, {known}"))
    if report.path is not None:
        own = report.path != "transformers"
        rows.append(("computed by", f"our own decoder ({report.path})" if own else "transformers, over our cache"))
        rows += [("" if number else "lost there", text) for number, text in enumerate(report.lost)]
    if report.quantization is not None:
        known = "supported" if report.quantization_is_supported else "not supported"
        rows.append(("quantised with", f"{report.quantization}: {known}"))
    if report.parameters is not None:
        rows.append(("parameters", f"{report.parameters / 1e6:,.1f} million"))
    if report.active_parameters is not None:
        total, chosen = report.experts
        active = f"{report.active_parameters / 1e6:,.1f} million for each token"
        rows.append(("", f"{active}, which goes to {chosen} of {total} experts"))
    if report.weight_bytes is not None:
        others = ", ".join(f"{name} {gigabytes(size)}" for name, size in report.weight_bytes_by_dtype.items())
        where = ", on the rank that has most" if report.ranks else ""
        rows.append(("weights", f"{gigabytes(report.weight_bytes)} as they would be loaded{where} (all {others})"))
    if report.ranks:
        rows += _describe_ranks(report.ranks)
    if report.free_bytes is not None:
        rows.append(("memory", f"{gigabytes(report.free_bytes)} free{' for each rank' if report.ranks else ''}"))
    if report.kv_bytes_per_token is not None:
        rows.append(("KV cache", f"{report.kv_bytes_per_token:,} bytes per token"))
        rows += [("", _describe_layers(group)) for group in report.kv_layers]
        if report.window is not None:
            most = gigabytes(report.window * report.kv_bytes_per_token)
            rows.append(("", f"a request keeps the last {report.window:,} tokens ({most}), however long it gets"))
        if report.partial_window is not None and report.far_bytes_per_token is not None:
            kept = f"{report.far_bytes_per_token:,} bytes for each token that is further back"
            rows.append(("", f"a request keeps all of its last {report.partial_window:,} tokens, and {kept}"))
    if report.kv_cache_tokens is not None:
        reason = report.reasons.get("max_batch_total_tokens", "")
        rows.append(("", f"{report.kv_cache_tokens:,} tokens ({reason})"))
        if report.window_cache_tokens is not None:
            reason = report.reasons.get("num_window_blocks", "")
            rows.append(("", f"{report.window_cache_tokens:,} of them in layers that read a window ({reason})"))
    if report.picture_bytes is not None:
        each = f"{gigabytes(report.picture_bytes)} in {report.picture_layers} layers of cross-attention"
        rows.append(("keys and values of a picture", each))
        if report.max_cached_pictures is not None:
            reason = report.reasons.get("max_cached_pictures", "")
            rows.append(("", f"{report.max_cached_pictures:,} at a time ({reason})"))
    rows += [(name, f"{value:,} ({report.reasons.get(name, '')})") for name, value in report.limits.items()]
    if report.tokenizer is not None:
        rows.append(("tokenizer", "found" if report.tokenizer else "missing"))
        rows.append(("chat template", "found" if report.chat_template else "missing"))
    if report.stop_tokens:
        rows.append(("a text ends with", ", ".join(report.stop_tokens)))
    if report.tool_calls is not None:
        rows.append(("tool calls", report.tool_calls))
    if report.thinking is not None:
        rows.append(("thinking", report.thinking))
    if report.picture_tokens:
        costs = ", ".join(f"{count} at {size}" for size, count in report.picture_tokens.items())
        rows.append(("tokens of a picture", costs))
    if report.download_bytes:
        rows.append(("to download", gigabytes(report.download_bytes)))
    verdict = "it fits" if report.fits else f"it cannot be served: {'; '.join(report.problems)}"
    lines = [report.model]
    for name, text in rows:
        lines += _row(name, text, width)
    for note in report.notes:
        lines += _wrap(f"  note: {note}", width, 8)
    return "\n".join([*lines, *_row("verdict", verdict, width)])


def _describe_ranks(ranks: list[RankPart]) -> list[tuple[str, str]]:
    """Ranks that have the same in one row."""
    groups: dict[tuple[str, int], list[int]] = {}
    for rank, part in enumerate(ranks):
        groups.setdefault((gigabytes(part.weight_bytes), part.kv_bytes_per_token), []).append(rank)
    rows = [("ranks", f"{len(ranks)}")]
    for (weights, kv_bytes), members in groups.items():
        named = f"rank {members[0]}" if len(members) == 1 else f"ranks {', '.join(map(str, members))}"
        rows.append(("", f"{named}: weights {weights}, KV cache {kv_bytes:,} bytes per token"))
    return rows


def _describe_layers(group: KvLayers) -> str:
    seen = "all tokens" if group.window is None else f"the last {group.window:,} tokens"
    return f"{group.num_layers} layers keep {group.kind} and read {seen}: {group.bytes_per_token:,} bytes"


def _row(name: str, text: str, width: int | None) -> list[str]:
    if width is None or width >= _NARROW:
        return _wrap(f"  {name:<25} {text}", width, 28)
    return [*([f"  {name}"[:width]] if name else []), *_wrap(f"    {text}", width, 4)]


def _wrap(line: str, width: int | None, indent: int) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(line, max(width, 2 * indent), subsequent_indent=" " * indent, break_on_hyphens=False)
