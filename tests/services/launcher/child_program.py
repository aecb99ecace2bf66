"""A service for the tests of `services/launcher/child.py`: `python -m tests.services.launcher.child_program`;
BEHAVIOUR says what it does.

It connects to the socket ROLL and sends its name. It and what it starts keep that connection open as long as
they live.
"""

import json
import os
import signal
import socket
import subprocess
import sys


def main() -> None:
    """Serve, ignore SIGTERM (`stubborn`), or end with a last line and an exit code (`CODE words`).

    LOG among the words stands for other letters each time.
    """
    behaviour = os.environ["BEHAVIOUR"]
    if behaviour[0].isdigit():
        code, _, words = behaviour.partition(" ")
        print(words.replace("LOG", os.urandom(8).hex()), flush=True)
        sys.exit(int(code))
    with socket.socket(socket.AF_UNIX) as roll:
        roll.connect(os.environ["ROLL"])
        helper = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"], pass_fds=(roll.fileno(),)
        )
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        facts = {"pid": os.getpid(), "helper": helper.pid, "instance": os.environ["TETHER_INSTANCE"]}
        roll.sendall(json.dumps(facts).encode() + b"\n")
        while behaviour == "stubborn":
            signal.pause()
        signal.sigwait([signal.SIGTERM])
        print("drained", flush=True)


if __name__ == "__main__":
    main()
