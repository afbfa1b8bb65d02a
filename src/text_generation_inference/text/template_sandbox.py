"""The Jinja environment in which chat templates run: what they can reach, and how much they can do.

Used by `chat_template`. Names and filters are those of transformers. A template can change nothing and reaches no
Python internals; every loop, call, filter and operator pays from the budget of the rendering (`template_budget`), so a
template that would run for long, or fill the memory, fails instead.
"""

import functools
import json
import re
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
import markupsafe
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from text_generation_inference.text import template_budget as budget

# Not names that a template can write, so only `_ChargeNodes` uses these filters.
_STEP, _TEXT, _PART = "a step", "a joined text", "a part"
# These only look at a value or pick from it, or pay themselves; others may turn the whole of it into text.
_LIGHT_FILTERS = {"abs", "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list"}.union(
    {"map", "random", "reject", "rejectattr", "reverse", "round", "safe", "select", "selectattr", "slice", "tojson"}
)


class TemplateRefusal(jinja2.TemplateError):
    """The template itself refused the conversation, by `raise_exception`."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates whose renderings are bounded. A `Budget` must be current while one is compiled or rendered."""

    intercepted_binops = frozenset(("+", "*", "**", "%", "//"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
            finalize=_charge_output,
        )
        filters = cast(dict[str, Callable[..., Any]], self.filters)  # pyright: ignore[reportUnknownMemberType]
        filters["tojson"] = _to_json
        for name, function in filters.items():
            filters[name] = _charge_filter(name, function)
        filters[_STEP], filters[_TEXT], filters[_PART] = _charge_step, _charge_text, _charge_part
        tests = cast(dict[str, Callable[..., Any]], self.tests)  # pyright: ignore[reportUnknownMemberType]
        for name, function in tests.items():
            tests[name] = _charge_test(function)
        names = cast(dict[str, Any], self.globals)  # pyright: ignore[reportUnknownMemberType]
        names["raise_exception"] = _raise_exception
        names["strftime_now"] = _strftime_now
        names["dict"] = _Dict()
        names["namespace"] = _Namespace
        del names["lipsum"]  # random filler text, of any length

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        _ChargeNodes().visit(source)
        return super()._generate(source, *args, **options)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+":
                budget.charge_sum(left, right)
            case "*":
                budget.charge_product(left, right)
            case "**":
                budget.charge_power(left, right)
            case "%":
                budget.charge_format(left, right)
            case _:
                budget.check_integers(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        args = _charge_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"
        if isinstance(text, markupsafe.Markup):
            formatter: SandboxedFormatter = _ChargingEscapeFormatter(self, escape=text.escape)
        else:
            formatter = _ChargingFormatter(self)

        def format_text(*args: Any, **kwargs: Any) -> str:
            if not is_map:
                return type(text)(formatter.vformat(text, args, kwargs))
            (values,) = args
            return type(text)(formatter.vformat(text, (), values, **kwargs))

        return format_text


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's words for training: only its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own: what is set inside is not seen behind the block.
        return nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscored names, through which templates could reach Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # pyright: ignore[reportSelfClsParameterName]
        self, *pairs = args
        values: dict[str, Any] = dict(*pairs, **attributes)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


class _Dict:
    """What templates know as `dict`."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML and sorts; models saw neither."""
    budget.current.get().charge_value(value, len(indent) if isinstance(indent, str) else indent or 0)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


# -- what pays ------------------------------------------------------------------------------------------------------


class _ChargeNodes(NodeTransformer):
    """Lets each turn of a loop and each run of a macro pay, and what no operator or filter of Jinja's own would."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(node)))
        if node.test is not None:
            node.test = nodes.And(_step(node), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(node)))
        return node

    visit_CallBlock = visit_Macro
    visit_Block = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [part if isinstance(part, nodes.Const) else _filtered(part, _PART) for part in node.nodes]
        return _filtered(node, _TEXT)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            return node
        return _filtered(node, _PART)

    visit_Tuple = visit_List
    visit_Dict = visit_List


def _step(node: nodes.Node) -> nodes.Expr:
    """Pays for one turn: for the fixed text in it too, which nothing else would."""
    num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    return _filtered(nodes.Const(num_chars), _STEP)


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    filtered = nodes.Filter(node, name, [], [], None, None)
    filtered.set_lineno(node.lineno or 1)
    return filtered


@jinja2.pass_context  # with a context it cannot be computed at compile time
def _charge_step(_: jinja2.runtime.Context, num_chars: int) -> bool:
    budget.charge(num_chars)
    return True


def _charge_text(text: str) -> str:
    budget.charge(len(text))
    return text


def _charge_part(value: Any) -> Any:
    budget.charge_value(value)
    return value


@jinja2.pass_context
def _charge_output(_: jinja2.runtime.Context, value: Any) -> Any:
    budget.charge_value(value)
    return value


def _charge_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    has_context = hasattr(function, "jinja_pass_arg")
    extra = _FILTER_CHARGES.get(name)

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        head, values = args[:has_context], args[has_context:]
        if name == "join" and values:
            values = (list(values[0]), *values[1:])
        if name in _LIGHT_FILTERS:
            budget.charge(0)
        else:
            for value in values:
                budget.charge_value(value)
        if extra is not None:
            extra(*values, **kwargs)
        return function(*head, *values, **kwargs)

    return charged


def _charge_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        budget.charge(0)
        return function(*args, **kwargs)

    return charged


def _charge_count(_: Any, count: Any = 0, *__: Any, **kwargs: Any) -> None:
    counts = [count, *kwargs.values()]
    budget.charge(sum(abs(value) for value in counts if isinstance(value, int)))


def _charge_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    budget.charge((str(text).count("\n") + 1) * (len(width) if isinstance(width, str) else abs(width)))


def _charge_joined(values: list[Any], d: Any = "", attribute: Any = None) -> None:
    budget.charge_join(d, values)


def _charge_formatted(text: Any, *args: Any, **kwargs: Any) -> None:
    budget.charge_format(str(text), kwargs or args)


def _charge_round(_: Any, precision: Any = 0, *__: Any, **___: Any) -> None:
    budget.charge_power(10, abs(precision))


def _charge_wrapped(text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = "\n", *_: Any) -> None:
    if isinstance(wrapstring, str):
        budget.charge(len(wrapstring) * len(str(text)))


_FILTER_CHARGES: dict[str, Callable[..., None]] = {
    "batch": _charge_count,
    "center": _charge_count,
    "format": _charge_formatted,
    "indent": _charge_indent,
    "join": _charge_joined,
    "replace": budget.charge_replace,
    "round": _charge_round,
    "slice": _charge_count,
    "wordwrap": _charge_wrapped,
}


def _charge_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Pay for a call of a method that may make long text from short. Returns the arguments to call it with."""
    budget.charge(0)
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, str | bytes | int) or isinstance(function, types.FunctionType):
        if isinstance(function, _Dict | type):
            for value in (*args, *kwargs.values()):
                budget.charge_value(value)
        return args
    match getattr(function, "__name__", ""), owner:
        case "center" | "ljust" | "rjust" | "zfill" | "to_bytes", _:
            _charge_count(owner, *args, **kwargs)
        case "expandtabs", str() | bytes():
            size = (*args, *kwargs.values(), 8)[0]
            budget.charge(len(owner) * abs(size) if isinstance(size, int) else 0)
        case "replace", str() | bytes() if len(args) >= 2:
            budget.charge_replace(owner, *args)
        case "join", str() | bytes() if len(args) == 1:
            args = (list(args[0]),)
            budget.charge_join(owner, args[0])
        case "translate", str() | bytes():
            for value in args:
                budget.current.get().charge_times(value, len(owner))
        case _:
            budget.charge(len(owner) if isinstance(owner, str | bytes) else 0)
    return args


class _ChargingFormatter(SandboxedFormatter):
    """`str.format` in which each field pays for its text and its width."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            budget.charge_value(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        budget.charge_value(value)
        budget.charge(sum(int(width) for width in re.findall(r"\d+", format_spec)))
        return super().format_field(value, format_spec)


class _ChargingEscapeFormatter(_ChargingFormatter, SandboxedEscapeFormatter):
    """The same for text that the template marked as safe."""


def undeclared_names(environment: ChatEnvironment, source: str) -> set[str]:
    """The variables a template reads and does not set itself first."""
    return jinja2.meta.find_undeclared_variables(environment.parse(source))


def template_line(error: BaseException) -> int:
    """The line of the template where `error` was raised; 0 when it was raised elsewhere."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
