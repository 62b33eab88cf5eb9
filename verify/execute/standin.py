"""A stand-in for the part of ``pydantic`` that the packed modules use; a bundle has it as ``standin/pydantic.py``.

It is used only where pydantic is missing. It reads and writes the same JSON and refuses missing and unknown fields; it
checks no ranges or patterns: what a bundle holds was validated when it was packed, and its results are when they are
imported.
"""

from __future__ import annotations

import enum
import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar

_REQUIRED = object()
_NUMBERS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


class ValidationError(ValueError):
    """A missing or unknown field, or a value of the wrong kind."""


def ConfigDict(**options: Any) -> dict[str, Any]:
    return options


class FieldInfo:
    def __init__(self, default: Any) -> None:
        self.default = default


def Field(default: Any = _REQUIRED, **_: Any) -> Any:
    return FieldInfo(_REQUIRED if default is ... else default)


def model_validator(*, mode: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    assert mode == "after"

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function._after = True  # type: ignore[attr-defined]
        return function

    return mark


class BaseModel:
    model_fields: ClassVar[dict[str, Any]] = {}
    """Field to default."""
    _validators: ClassVar[tuple[str, ...]] = ()
    _hints: ClassVar[dict[str, Any] | None] = None

    def __init_subclass__(cls) -> None:
        fields = dict(cls.model_fields)
        for name, annotation in inspect.get_annotations(cls).items():
            if not name.startswith("_") and name != "model_config" and "ClassVar" not in str(annotation):
                given = cls.__dict__.get(name, _REQUIRED)
                fields[name] = given.default if isinstance(given, FieldInfo) else given
        cls.model_fields = fields
        found = (n for n, v in cls.__dict__.items() if getattr(v, "_after", False))
        cls._validators = (*cls._validators, *found)
        cls._hints = None

    def __init__(self, **given: Any) -> None:
        cls = type(self)
        if cls._hints is None:
            cls._hints = typing.get_type_hints(cls, include_extras=True)
        if unknown := set(given) - set(cls.model_fields):
            raise ValidationError(f"{cls.__name__} has no field {sorted(unknown)[0]}")
        for name, default in cls.model_fields.items():
            value = given.get(name, default)
            if value is _REQUIRED:
                raise ValidationError(f"{cls.__name__}.{name} is missing")
            if name in given:
                value = _convert(cls._hints[name], value, f"{cls.__name__}.{name}")
            self.__dict__[name] = value
        for validator in cls._validators:
            getattr(self, validator)()

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and _values(self) == _values(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in _values(self).items())})"

    @classmethod
    def model_validate(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        if not isinstance(data, dict):
            raise ValidationError(f"{cls.__name__} needs an object, got {type(data).__name__}")
        return cls(**data)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Any:
        return cls.model_validate(json.loads(text))

    def model_copy(self, *, update: dict[str, Any]) -> Any:
        made = object.__new__(type(self))
        made.__dict__.update(_values(self) | update)
        return made

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]:
        return {name: _plain(value, mode == "json") for name, value in _values(self).items()}

    def model_dump_json(self, *, indent: int | None = None) -> str:
        separators = None if indent else (",", ":")
        return json.dumps(self.model_dump(mode="json"), indent=indent, separators=separators, ensure_ascii=False)


def _values(model: BaseModel) -> dict[str, Any]:
    return {name: model.__dict__[name] for name in type(model).model_fields}


def _plain(value: Any, as_json: bool) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json" if as_json else "python")
    if isinstance(value, dict):
        return {_plain(k, as_json): _plain(v, as_json) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        made = [_plain(v, as_json) for v in value]
        return made if as_json else type(value)(made)
    if as_json and isinstance(value, enum.Enum):
        return value.value
    if as_json and isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _convert(arguments[0], value, where)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is tuple:
        return _convert_tuple(arguments, value, where)
    if origin is dict and isinstance(value, dict):
        return {_convert(arguments[0], k, where): _convert(arguments[1], v, where) for k, v in value.items()}
    if origin is typing.Literal and value in arguments:
        return value
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint.model_validate(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        return _NUMBERS[value] if value in _NUMBERS else float(value)
    if hint is bool and value in (0, 1):
        return bool(value)
    if hint is Any or (isinstance(hint, type) and isinstance(value, hint)):
        return value
    raise ValidationError(f"{where} cannot be {str(value)[:80]!r}")


def _convert_union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    for exact in choices:  # As pydantic's smart mode: a value that already is of one of the types stays as it is.
        if isinstance(exact, type) and type(value) is exact:
            return value
    for choice in choices:
        try:
            return _convert(choice, value, where)
        except ValueError:
            continue
    raise ValidationError(f"{where} cannot be {str(value)[:80]!r}")


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)):
        raise ValidationError(f"{where} must be a list")
    if len(arguments) == 2 and arguments[1] is ...:
        return tuple(_convert(arguments[0], v, where) for v in value)
    if len(arguments) != len(value):
        raise ValidationError(f"{where} has {len(value)} entries, not {len(arguments)}")
    return tuple(_convert(a, v, where) for a, v in zip(arguments, value, strict=True))
