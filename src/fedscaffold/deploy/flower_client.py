"""A site's client as a Flower app (flwr 1.41): a messenger of the site's worker.

Flower starts a process for every message. This one passes the message on to the worker, which holds
app, model and data (`worker.py`). The node's configuration says what it needs:

    site, folder    name of the site, and its folder
    files           a copy of the app, for files too large to be sent; "" for none
    worker          "kept" where somebody else keeps the worker running; "own" to start it with the
                    first message (the default); "none" to load everything anew for each message,
                    as on systems that cannot tell the user at the other end of a socket
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedscaffold.deploy.flower_records import SPARE, from_record, package_folder, to_record
from fedscaffold.deploy.messenger import ask_worker
from fedscaffold.deploy.worker_wire import AVAILABLE

__all__ = ["client_app"]

USEFUL = 0.9  # share of the deadline after which an answer would come too late

client_app = ClientApp()


@client_app.train()
@client_app.query()
def answer_message(message: Message, context: Context) -> Message:
    """Answer a request of the server: training, evaluation, resync or greeting."""
    given = context.node_config
    site, folder = str(given["site"]), Path(str(given["folder"]))
    beside, worker = str(given.get("files", "")), given.get("worker", "own")
    request = from_record(message.content)
    patience = USEFUL * max(message.metadata.ttl - SPARE, 1.0)
    if worker == "none" or not AVAILABLE:
        from fedscaffold.deploy.worker import Call, answer_call

        call = Call(site, str(package_folder()), beside, patience)
        reply, _ = answer_call(call, request, folder)
    else:
        reply = ask_worker(
            folder,
            site,
            request,
            package=package_folder(),
            beside=beside,
            patience=patience,
            kept=worker == "kept",
        )
    return Message(to_record(reply), reply_to=message)
