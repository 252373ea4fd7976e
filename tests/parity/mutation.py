"""Functions of a module with one mistake in their source, for tests that must see it."""

import inspect
import types
from collections.abc import Iterator


def apply(monkeypatch, module: types.ModuleType, right: str, wrong: str) -> None:
    """Exchanges a piece of a module's source, which is there once, in all functions that have it."""
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{right!r} is {source.count(right)} times in {module.__name__}"
    namespace = {"__name__": module.__name__}
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), namespace)
    mistaken, changed = dict(_functions(namespace, module.__name__)), 0
    for name, function in _functions(vars(module), module.__name__):
        code = mistaken[name].__code__
        if code != function.__code__:
            monkeypatch.setattr(function, "__code__", code)
            changed += 1
    assert changed, f"no function of {module.__name__} has {right!r}"


def _functions(namespace: dict, module: str) -> Iterator[tuple[str, types.FunctionType]]:
    """Functions and methods that were made there, whatever they are wrapped in, by qualified name."""
    for name, value in namespace.items():
        if getattr(value, "__module__", None) != module:
            continue
        if inspect.isclass(value):
            for own, method in vars(value).items():
                function = inspect.unwrap(method)
                if inspect.isfunction(function):
                    yield f"{name}.{own}", function
        elif inspect.isfunction(inspect.unwrap(value)):
            yield name, inspect.unwrap(value)
