"""The keys by which a turn says whether it is learnt.

    weight       OpenAI, Together, Mistral: 0 or 1
    loss_weight  LLaMA-Factory: 0 or 1
    train, training   axolotl: false or true
    loss         ms-swift: false or true
"""

from preprocess_input import RecordError

MARKS = ("weight", "loss_weight", "train", "training", "loss")
PARTS = ("train_detail", "training_detail")  # axolotl's keys for parts of an answer


def without_marks(turn):
    return {key: value for key, value in turn.items() if key not in MARKS + PARTS}


def is_learnt(where, turn, role):
    """Answers are, unless a mark says otherwise; questions are not, and no mark may say otherwise."""
    said = {key: turn[key] for key in MARKS if turn.get(key) is not None}
    for key, value in said.items():
        if value not in (0, 1):
            raise RecordError(f"{where}: {key!r} of a turn is {value!r}; a turn is learnt or not: give 0 or 1, or "
                              "false or true")
    for key in PARTS:
        if turn.get(key):
            raise RecordError(f"{where}: {key!r} of a turn is not read, since turns are learnt as a whole; delete it")
    if len({bool(value) for value in said.values()}) > 1:
        raise RecordError(f"{where}: {' and '.join(map(repr, said))} of a turn contradict each other; delete one")
    if role != "assistant":
        asked = [key for key, value in said.items() if value and key != "weight"]  # 1 is the default of weight
        if asked:
            raise RecordError(f"{where}: {asked[0]!r} asks to learn a turn of the {role}; only answers are learnt: "
                              "delete it")
        return False
    return all(said.values())
