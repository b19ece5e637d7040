"""Start the server of `shoal ui`, on the loopback interface only."""

import errno
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.mistakes import UserMistake

ADDRESS = "127.0.0.1"
TRIED = 20  # ports after the one that is taken
DEFAULT_FOLDER = Path("runs")


def serve(folder: Path | None, *, port: int, say: Callable[[str], None]) -> None:
    """Serve until the process is interrupted."""
    try:
        import uvicorn

        from shoal.ui.app import make_app
    except ImportError as error:
        raise UserMistake(f"shoal ui needs {error.name}: pip install 'shoal[ui]'.") from None

    shown = check_folder(folder, say)
    with listen(port, say) as opened:
        actual = opened.getsockname()[1]
        app = make_app(shown, actual)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False, lifespan="off"))
        # So that the first page of many or long runs does not wait for all their files.
        threading.Thread(target=app.state.runs.read_all, daemon=True).start()
        say(f"shoal ui    http://{ADDRESS}:{actual}    (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):  # as one ends it
            server.run(sockets=[opened])


def check_folder(folder: Path | None, say: Callable[[str], None]) -> Path:
    """The folder to show. `runs`, the default, may be made later: the planner needs none."""
    shown = DEFAULT_FOLDER if folder is None else folder.expanduser()
    if shown.is_dir():
        from shoal.ui.folder import RunsFolder

        if not RunsFolder(shown).names():
            say(f"There are no runs in {shown} yet; they appear when they start.")
        return shown
    if folder is not None or shown.exists():
        what = "is not a folder" if shown.exists() else "does not exist"
        raise UserMistake(f"{shown} {what}; give the folder that holds your runs, such as runs.")
    say(f"There is no folder {shown} here yet; runs appear when it exists.")
    return shown


def listen(port: int, say: Callable[[str], None]) -> socket.socket:
    """A socket on this port, or on one of the next if it is taken."""
    for candidate in (*range(port, min(port + TRIED, 65536)), 0):
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((ADDRESS, candidate))
            opened.listen(64)  # another process may be bound to it that listens later
        except OSError as error:
            opened.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise UserMistake(f"--port {port} cannot be opened: {error.strerror}.") from None
        if candidate != port:
            say(f"Port {port} is in use; taking {opened.getsockname()[1]} instead.")
        return opened
    raise UserMistake("No port of 127.0.0.1 is free.")
