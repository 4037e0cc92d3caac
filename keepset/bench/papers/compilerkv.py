"""CompilerKV: Risk-Adaptive KV Compression via Offline Experience Compilation (Yang and others 2026)."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from keepset.bench.analysis.rows import Figure
from keepset.bench.latency import Timing, latency
from keepset.bench.papers.entry import SCORE, Entry, Key, Measured, Measurement, Options, Sweep, recipe_of
from keepset.bench.tasks.task import Tokenizer
from keepset.core.tables import Tables, load
from keepset.errors import KeepsetError
from keepset.offline.corpus import default_texts

INTERN, LLAMA = "internlm/internlm2_5-7b-chat-1m", "meta-llama/Meta-Llama-3-8B-Instruct"
QWEN, MISTRAL = "Qwen/Qwen2-7B-Instruct", "mistralai/Mistral-7B-Instruct-v0.2"
_MODELS = (LLAMA, QWEN, MISTRAL, INTERN)
_BUDGETS = (64, 128, 256, 512, 1024)
"""Section 5.3 names the first and the last."""
_ROUNDS = 3
_CHARACTERS = 8
"""More than a token of an essay has."""
_OURS = "compilerkv(tables={tables})"
_BASELINES = {
    "StreamingLLM": "streaming_llm",
    "H2O": "h2o",
    "SnapKV": "snapkv",
    "PyramidKV": "pyramid(snapkv)",
    "DynamicKV": "dynamic(snapkv)",
}
_TABLE_1 = {
    "StreamingKV": "streaming_llm",
    "H2O": "h2o",
    "SnapKV": "snapkv",
    "PyramidKV": "pyramid(snapkv)",
    "ZigZagKV": "zigzag(snapkv)",
    "DynamicKV": "dynamic(snapkv)",
    "Ours": _OURS,
    "Ours, thresholds of the mean": "compilerkv(tables={tables}, threshold='mean')",
    "Ours, filled up": "compilerkv(tables={tables}, elastic=False)",
}
_ABLATIONS = {
    "CompilerKV (Full)": _OURS,
    "w/o Head Reliability": "compilerkv(tables={tables}, head_table=False)",
    "w/o Risk-Adaptive τ": "compilerkv(tables={tables}, gate=False)",
    "w/o Stabilized Utility": "compilerkv(tables={tables}, global_mean=False, relative_norm=False)",
}


def _longbench(methods: Mapping[str, str], *keeps: int, full: str = "FullKV") -> Sweep:
    """Sixteen tasks under budgets of so many entries in every layer; CompilerKV may keep fewer."""
    return Sweep(("longbench",), methods, keeps, full=full, metrics=(SCORE, "keep"), average="longbench")


def _cost(model: PreTrainedModel, tokenizer: Tokenizer, options: Options) -> list[Measured]:
    """Table A1, medians over rounds, of which there are as many as examples are asked for."""
    lengths = options.lengths or (8192, 16384, 32768)
    text = "\n\n".join(default_texts())[: _CHARACTERS * max(lengths)]
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(model.device)
    recipe = recipe_of(f"{_OURS[:-1]}, keep=512)", options.files)
    rows: list[Measured] = []
    for length in lengths:
        output = options.answer_tokens or length // 4
        if length > ids.shape[1]:
            raise KeepsetError(
                f"The texts have {ids.shape[1]} tokens, fewer than {length}: give fewer --prompt-tokens."
            )
        timings: list[Timing] = []
        for timings in latency(model, [ids[:, :length]], [recipe], output, options.limit or _ROUNDS):  # noqa: B007
            pass
        for (method, keep), timing in zip((("FullKV", None), ("CompilerKV", 512)), timings, strict=True):
            for metric, value in _paper_units(timing).items():
                figure = None if value is None else Figure(value, None, None)
                key = Key(f"{length} + {output}", method, keep, metric)
                rows.append(Measured(key, figure, len(timing.rounds), int(timing.error is not None), timing.error))
    return sorted(rows, key=lambda row: (int(row.key.task.split()[0]), row.key.metric))


def _paper_units(timing: Timing) -> dict[str, float | None]:
    figures = timing.figures()
    peak = figures.get("peak_bytes")
    return {
        "seconds to the first token": figures.get("first_seconds"),
        "tokens per second": figures.get("tokens_per_second"),
        "seconds": figures.get("seconds"),
        "peak memory, MB": None if peak is None else peak / 2**20,
    }


def _head_weights(model: PreTrainedModel, tokenizer: Tokenizer, options: Options) -> list[Measured]:
    """Figure A2, layer by layer: the mean weight, and the share of heads with less than 1."""
    tables, rows = _tables(options), []
    for name, of_head in (("weight", tables.weights), ("heads below 1", (tables.weights < 1).float())):
        for layer, of_layer in enumerate(of_head.mean(2).T.tolist(), 1):
            rows += _row(tables, f"layer {layer}", name, of_layer)
    return rows


def _thresholds(model: PreTrainedModel, tokenizer: Tokenizer, options: Options) -> list[Measured]:
    """Figure A3: the mean of all layers, for each bin of either risk."""
    tables, rows = _tables(options), []
    of_bin = tables.gate.mean(1)
    for risk, means in (("perplexity", of_bin.mean(1)), ("entropy", of_bin.mean(2))):
        for number, of_budget in enumerate(means.T.tolist(), 1):
            rows += _row(tables, f"{risk}, bin {number} of {means.shape[1]}", "threshold", of_budget)
    return rows


def _tables(options: Options) -> Tables:
    if "tables" not in options.files:
        raise KeepsetError(
            "This figure shows a model's tables: give them as --tables, made by "
            "`keepset compile --model MODEL --out tables.safetensors`."
        )
    return load(str(options.files["tables"]))


def _row(tables: Tables, place: str, metric: str, of_budget: Sequence[float]) -> list[Measured]:
    return [
        Measured(Key(place, "CompilerKV", keep, metric), Figure(value, None, None), 1)
        for keep, value in zip(tables.budgets.tolist(), of_budget, strict=True)
    ]


def _needs_tables(keep: str) -> str:
    return (
        f"CompilerKV needs tables of each model: `keepset compile --model MODEL --keeps {keep} --text TEXTS --out "
        "tables.safetensors`, then --model MODEL --tables tables.safetensors; without, all heads count the same and "
        "there is one threshold. TEXTS are not to be LongBench's. InternLM-2.5 comes with code of its own, which is "
        "not run: convert it to Llama's form and name that as MODEL."
    )


_MAPS = (
    "The paper draws maps, without figures. `keepset compile --show tables.safetensors --html tables.html` draws them "
    "of any tables."
)
_AVERAGES = "Four of the paper's averages, those of ZigZagKV, are not the means of its figures."

ENTRIES = (
    Entry(
        "compilerkv-table-1",
        "CompilerKV, Table 1",
        "LongBench, 512 entries in every layer",
        _MODELS,
        (_longbench(_TABLE_1, 512),),
        note=f"{_needs_tables('512')} {_AVERAGES} By equation 15 few entries reach a threshold, and hardly ever 512 "
        "stay. Two other readings stand beside it: 'thresholds of the mean', as appendix B.1 has utilities lie "
        "around 1, and 'filled up', as the authors' program does in place of equation 16. Their tables want `keepset "
        "compile --recipe` with the same parameters.",
    ),
    Entry(
        "compilerkv-table-2",
        "CompilerKV, Table 2",
        "What each part is worth: LongBench, 512 entries in every layer",
        _MODELS,
        (_longbench(_ABLATIONS, 512, full=""),),
        note=f"{_needs_tables('512')} All lines take the same tables. Without stabilized utility attention is each "
        "head's own and values are not looked at.",
    ),
    Entry(
        "compilerkv-table-a1",
        "CompilerKV, Table A1",
        "Time and memory of a generation",
        (MISTRAL,),
        (Measurement(_cost, "4 generations at each of 8192, 16384 and 32768 tokens, by each of two caches"),),
        note="The paper names neither model, budget nor device: this is Mistral, and 512 entries in every layer. "
        "--prompt-tokens are their lengths, --output-tokens (a quarter of the prompt) what is generated, and --limit "
        f"the rounds ({_ROUNDS}).",
    ),
    Entry(
        "compilerkv-table-a2",
        "CompilerKV, Table A2",
        "LongBench, 128 entries in every layer",
        _MODELS,
        (_longbench({**_BASELINES, "CompilerKV": _OURS}, 128),),
        note=_needs_tables("128"),
    ),
    Entry(
        "compilerkv-figure-2",
        "CompilerKV, Figure 2",
        "LongBench under budgets of 64 to 1024 entries in every layer",
        _MODELS,
        (_longbench({**_BASELINES, "CompilerKV": _OURS}, *_BUDGETS),),
        note=f"{_needs_tables('128,256,512')} Neither the budgets between, the methods nor the model are in the text. "
        "What it shows of CompilerKV under all four models is Figure A1.",
    ),
    Entry(
        "compilerkv-figure-3",
        "CompilerKV, Figure 3",
        "A needle at any depth of texts of many lengths",
        (MISTRAL,),
        (
            Sweep(
                ("needle",),
                {**_BASELINES, "CompilerKV": _OURS},
                (512,),
                full="FullKV",
                lengths=(2048, 4096, 8192, 12288, 16384, 20480, 24576, 28672, 32000),
                average="needle",
            ),
        ),
        note=f"{_needs_tables('512')} Budget, lengths and haystack are not in the text. Maps of length and depth: "
        "`keepset results FILE --html needle.html` of the file that is written.",
    ),
    Entry(
        "compilerkv-figure-a2",
        "CompilerKV, Figure A2",
        "Weights of heads in a compiled table",
        _MODELS,
        (Measurement(_head_weights, "no generation: what --tables has"),),
        note=_MAPS,
    ),
    Entry(
        "compilerkv-figure-a3",
        "CompilerKV, Figure A3",
        "Thresholds of a compiled table by risk",
        _MODELS,
        (Measurement(_thresholds, "no generation: what --tables has"),),
        note=_MAPS,
    ),
)
