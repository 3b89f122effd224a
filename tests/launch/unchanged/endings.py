"""One start, one way to end; what fails is started again, the last one succeeds."""

import atexit
import os
import signal
import sys
import threading


class Dying:
    def __del__(self) -> None:
        os.write(1, b"deleted\n")


def raises() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("two lines\nand ☃") from error


def exits_with_a_number() -> None:
    sys.exit(3)


def exits_with_a_message() -> None:
    sys.exit("a message")


def is_interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


def is_terminated() -> None:
    print("before the signal")
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_at_once() -> None:
    print("a whole line")
    os._exit(5)


def has_a_syntax_error() -> None:
    compile("def", "broken.py", "exec")


def has_a_hook_of_its_own() -> None:
    sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, trace.tb_frame.f_code.co_name)
    raise RuntimeError("for the hook")


def has_a_broken_hook() -> None:
    sys.excepthook = lambda kind, error, trace: int("no number")
    raise RuntimeError("for the broken hook")


def has_a_broken_exit_handler() -> None:
    atexit.register(lambda: int("no number"))
    sys.exit(4)


def raises_a_group() -> None:
    raise ExceptionGroup("several", [ValueError(1), TypeError(2)])


def fails_in_a_thread() -> None:
    thread = threading.Thread(target=raises)
    thread.start()
    thread.join()


ENDINGS = [
    raises,
    exits_with_a_number,
    exits_with_a_message,
    is_interrupted,
    is_terminated,
    is_killed,
    leaves_at_once,
    has_a_syntax_error,
    has_a_hook_of_its_own,
    has_a_broken_hook,
    has_a_broken_exit_handler,
    raises_a_group,
    fails_in_a_thread,
]

if __name__ == "__main__":
    cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dying = Dying()
    left = open(os.path.join(os.environ["CASE_OUT"], f"left-{cycle}"), "w")
    left.write("left open")
    atexit.register(print, "exit handler of", ENDINGS[cycle].__name__)
    ENDINGS[cycle]()
