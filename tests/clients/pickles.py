"""What Python's own unpickler makes of a pickle when nothing that it names is run, as tests/support/pickle_json.h writes it."""
import io
import pickle
import struct


class Recorder(type):
    """The type of all globals: what would be called with arguments is an object that remembers."""

    def __call__(cls, *arguments):
        return remember(cls, "reduce", arguments)


def remember(cls, how, arguments):
    made = object.__new__(cls)
    made.how, made.arguments, made.changes = how, arguments, []
    return made


def new_global(module, name):
    def change(kind):
        def add(self, values):
            if self.changes and self.changes[-1][0] == kind and kind != "state":
                self.changes[-1].extend(values)
            else:
                self.changes.append([kind, *values])
        return add

    items, pairs, state = change("items"), change("pairs"), change("state")
    return Recorder(name, (), {
        "__new__": lambda cls, *arguments: remember(cls, "new", arguments),
        "extend": lambda self, values: items(self, values),
        "append": lambda self, value: items(self, [value]),
        "__setitem__": lambda self, key, value: pairs(self, [key, value]),
        "__setstate__": lambda self, value: state(self, [value]),
        "module": module, "name": name})


class Persistent:
    def __init__(self, value):
        self.value = value


class Unpickler(pickle.Unpickler):
    def __init__(self, file):
        super().__init__(file, fix_imports=False)
        self.globals = {}

    def find_class(self, module, name):
        return self.globals.setdefault((module, name), new_global(module, name))

    def persistent_load(self, pid):
        return Persistent(pid)


def form(value):
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if -2**63 <= value < 2**63:
            return value
        return {"long": value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True).hex()}
    if isinstance(value, float):
        return {"float": struct.pack(">d", value).hex()}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: value.hex()}
    if isinstance(value, list):
        return [form(item) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        return {type(value).__name__: [form(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[form(key), form(item)] for key, item in value.items()]}
    if isinstance(value, Persistent):
        return {"id": form(value.value)}
    if isinstance(value, Recorder):
        return {"global": f"{value.module} {value.name}"}
    return {"call": [value.how, form(type(value)), {"tuple": [form(item) for item in value.arguments]},
                     [[kind, *map(form, values)] for kind, *values in value.changes]]}


def of_python(data):
    return form(Unpickler(io.BytesIO(data)).load())


def merged(value):
    """Changes of the same kind that follow each other as one, and sets in an order."""
    if isinstance(value, list):
        return [merged(item) for item in value]
    if not isinstance(value, dict):
        return value
    (tag, inner), = value.items()
    inner = merged(inner)
    if tag in ("set", "frozenset"):
        inner.sort(key=repr)
    if tag == "call":
        changes = []
        for kind, *values in inner[3]:
            if changes and changes[-1][0] == kind and kind != "state":
                changes[-1] += values
            else:
                changes.append([kind, *values])
        inner[3] = changes
    return {tag: inner}
