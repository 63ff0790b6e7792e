"""Calls made as other users, for tests that root runs."""
import errno
import os
import traceback

import mount

ANN, BOB, ROOT = (41001, 42001), (41002, 42002), (0, 0)  # user and group


def write_text(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def read_text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def run_as(user, call, *arguments, groups=()):
    """What the call returned, as a text; or the name of the errno by which it failed; or its traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups(list(groups))
        os.setgid(user[1])
        os.setuid(user[0])
        try:
            answer = call(*arguments) or ""
        except OSError as error:
            answer = errno.errorcode[error.errno]
        except Exception:  # pylint: disable=broad-except
            answer = traceback.format_exc()  # and never into the caller's own clean-up
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        answer = file.read()
    os.waitpid(child, 0)
    return answer


class TestCase(mount.TestCase):
    """On a mount that other users may reach."""
    only_root = "can become other users"

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.chmod(cls.mount.top, 0o755)
