"""A process that is killed in the middle of its second answer: `python -m tests.chat.killed DIRECTORY CONFIG`."""

import os
import signal
import sys
from pathlib import Path

from tests.chat.tiny import CONFIGS, QUESTIONS, talk


def main(path: Path, name: str) -> None:
    with talk(path, CONFIGS[name]) as conversation:
        conversation.say(QUESTIONS[0])
        left = [6]

        def die(token: int) -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        conversation.say(QUESTIONS[1], die)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
