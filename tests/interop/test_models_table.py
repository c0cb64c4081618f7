"""`megashard models` says what the strategies' table and the families say."""
from megashard import PROGRAM, ROOT, run
from test_strategies import EXPERTS, FAMILIES, PLAIN, has, sees

TITLES = ("model_type", "class", "parts of a layer", "experts", "towers", "tensor parallel", "Ulysses", "ring",
          "torch_dist layout")


def read_table():
    """{model_type: {title: cell}}"""
    titles, *rows = run(PROGRAM, "models").stdout.strip("\n").splitlines()
    starts = [titles.index(title) for title in TITLES]
    cells = [[row[start:end].strip() for start, end in zip(starts, [*starts[1:], None])] for row in rows]
    return {row[0]: dict(zip(TITLES, row)) for row in cells}


def test_every_family_is_there():
    families = {line.split('"')[1] for path in (ROOT / "models" / "families").glob("*.cpp")
                for line in path.read_text().splitlines() if ".model_type = " in line}
    table = read_table()
    assert table.keys() == families and len(families) > 40
    assert table["qwen3_omni_moe"]["towers"] == "visual, audio_tower"
    assert table["qwen3_next"]["parts of a layer"] == "linear_attn, mlp, self_attn"


def test_it_says_what_is_trained():
    table = read_table()
    for family in FAMILIES:
        row = table[{"gemma3": "gemma3_text"}.get(family, family)]
        assert (row["tensor parallel"] == "yes") == has(family, PLAIN["TP 2"]), family
        assert (row["ring"] == "yes") == has(family, PLAIN["ring 2"]), family
        assert row["Ulysses"] == "yes", family
        assert (row["towers"] != "-") == sees(family)
        assert (row["experts"] == "yes") == (family.endswith("_moe") or family in EXPERTS), family
