"""Runs texts of Python in processes that have imported PyTorch already: each is forked by this one, which does nothing else.

A line of standard input is a JSON object: `text`; `arguments`, a list of words for each process; `logs`, for each process
the file that what it says goes to; `directory`, where they run. When all have ended a line says their exit codes. A process
finds what `python -c TEXT WORD…` would: `__main__` with nothing in it, modules as they are right after their import, and
no thread but its own.
"""
import json
import os
import signal
import sys
import traceback
import types

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # or NumPy's begins some at once

# pylint: disable=wrong-import-position
import torch
import torch._dynamo  # what optimizers and DTensors import when they are first used
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel


def run(text, words):
    """The exit code, as of a script."""
    sys.argv = ["-c", *words]
    sys.path[0] = ""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        exec(compile(text, "<string>", "exec"), main.__dict__)  # pylint: disable=exec-used
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # pylint: disable=broad-except
        traceback.print_exc()
        return 1
    return 0


def become(text, words, log, directory):
    """Never returns."""
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDWR)
        for wanted, fd in ((0, null), (1, out), (2, out)):
            os.dup2(fd, wanted)
        os.closerange(3, 1024)
        os.chdir(directory)
        code = run(text, words)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def serve(requests, answers):
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: what one of them holds would be held for ever in a child"
    for line in requests:
        wanted = json.loads(line)
        children = []
        for words, log in zip(wanted["arguments"], wanted["logs"]):
            child = os.fork()
            if child == 0:
                become(wanted["text"], words, log, wanted["directory"])
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    serve(sys.stdin, sys.stdout)
