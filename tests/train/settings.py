#!/usr/bin/env python3
"""Settings of fsdp-train against what they mean: ways to run that change no step, the start line, AdamW and
the schedules in numpy, the order of data, the values of --eval and --sample, the alarm of stale saves.

Usage: settings.py BUILD [CASE...]
"""
import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np

from resume import (BUILD, TEXT, check, clean_environment, exact, expect_refusal, lines_of, main, place,
                    read_safetensors, run, steps_of)

CONTEXT, BATCH = 8, 5
SMALL = ["--model.layers", 2, "--model.width", 16, "--model.context", CONTEXT, "--train.batch", BATCH]


def tool(name, *words):
    return [str(word) for word in (BUILD / "bin" / name, *words)]


def train(directory, *more, ranks=0, **options):
    words = tool("fsdp-train", "--run", directory / "run", "--data.path", directory.parent / "data.txt",
                 *SMALL, *(["--np", ranks] if ranks else []), *more)
    return run(words, **options)


def trained(work, name, *more, **options):
    directory = place(work, name)
    done = train(directory, "--steps", 4, *more, **options)
    check(f"{name}: exit", done.returncode == 0, done.stderr)
    return directory


def metrics(directory, kind):
    lines = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (line.get("event"), "step" if "loss" in line else None)]


def step_lines(directory):
    return [json.loads(line) for line in lines_of(directory)]


def tensors_of(checkpoint, work):
    """{name: array of f64} of all tensors of a checkpoint."""
    out = work / f"{checkpoint.parents[1].name}.{checkpoint.name}.safetensors"
    done = run(tool("fsdp-convert", checkpoint, out, "-q", "--only", "all", "--drop", "values"))
    check(f"{out.name}: exit", done.returncode == 0, done.stderr)
    return {name: np.frombuffer(data, "<f4").reshape(shape).astype("f8")
            for name, (_, shape, data) in read_safetensors(out).items()}


# --- the first line ------------------------------------------------------------------------------


def start_line(work):
    """It names kernels, products, and the dropout that a config wants and does not get."""
    directory = place(work, "start")
    for products, wanted in ("own", "c$"), ("openblas", r"OpenBLAS \w+$"):
        done = train(directory, "--steps", 0, env=clean_environment(FSDP_KERNELS="c", FSDP_PRODUCTS=products))
        shutil.move(directory / "run", directory / products)
        first = done.stderr.splitlines()[0]
        check(f"start: {products}", re.search("dropout 0, .*kernels c, products " + wanted, first), first)
    model = directory / "hf"
    run(tool("fsdp-convert", directory / "own", model, "--to", "hf"))
    config = json.loads((model / "config.json").read_text())
    for rate in 0, 0.1:
        (model / "config.json").write_text(json.dumps(dict(config, resid_pdrop=rate)))
        done = train(place(work, f"dropout {rate}"), "--steps", 0, "--init", model)
        told = "dropout of the model's config is treated as 0" in done.stderr
        check(f"dropout {rate}", told == (rate > 0), done.stderr)


# --- ways to run ---------------------------------------------------------------------------------


def events_of(directory):
    return [json.loads(line) for line in (directory / "trace-0").read_text().splitlines()]


def groups(events, kind):
    return {len(event["group"]) for event in events if event["event"] == kind}


def way(work, name, ranks, *more):
    """A traced training."""
    trace = work / name / "trace-%r"
    return trained(work, name, "--trace", trace, *more, ranks=ranks)


def expect_close(what, a, b):
    one, other = step_lines(a), step_lines(b)
    check(f"{what}: batches", [x["batch"] for x in one] == [x["batch"] for x in other])
    apart = max(abs(x["loss"] - y["loss"]) for x, y in zip(one, other, strict=True))
    check(f"{what}: losses", apart <= 1e-5, apart)
    apart = max(abs(x["grad_norm"] / y["grad_norm"] - 1) for x, y in zip(one, other, strict=True))
    check(f"{what}: gradients", apart <= 1e-4, apart)


def ways(work):
    """Settings that may not change a step: each is seen in the trace, the files or the messages, too."""
    plain, plain4 = way(work, "plain", 2), way(work, "plain4", 4)
    many = way(work, "many", 2, "--parallel.reshard", "false", "--save.compress", "zstd",
               "--save.async", "false", "--log.tensorboard", "false", "--log.every", 3,
               "--parallel.mesh", "dp=2")
    check("many: step lines", exact(lines_of(many)) == exact(lines_of(plain)), lines_of(many))
    last = "run/step-00000004"
    done = run(tool("fsdp-diff", plain / last, many / last, "--exclude", "^train.config$"))
    check("many: state", done.returncode == 0, done.stdout + done.stderr)
    for directory, is_set in (plain, False), (many, True):
        seen = events_of(directory)
        kinds = {(event["event"], event.get("state")) for event in seen}
        listed = json.loads(run(tool("fsdp-ls", "--json", directory / last)).stdout)
        log = (directory / "run/main.log").read_text()
        check(f"{directory.name}: reshard", (("unshard", "pre_backward") in kinds) != is_set, kinds)
        check(f"{directory.name}: compress", listed["compressed"] == is_set, listed["compressed"])
        check(f"{directory.name}: async", any(kind == "async_save" for kind, _ in kinds) != is_set, kinds)
        check(f"{directory.name}: tensorboard", any((directory / "run").glob("events*")) != is_set)
        check(f"{directory.name}: log.every", ("step 1 " in log) != is_set and "step 3 " in log, log)
    pairs = way(work, "pairs", 4, "--parallel.reshard", 2)
    check("reshard of 2: step lines", exact(lines_of(pairs)) == exact(lines_of(plain4)), lines_of(pairs))
    check("reshard of 2: groups", (groups(events_of(pairs), "all_gather"),
                                   groups(events_of(plain4), "all_gather")) == ({2, 4}, {4}))
    copies = way(work, "copies", 4, "--parallel.mesh", "replicate=2,dp=2")
    expect_close("replicate", copies, plain4)
    sizes = [groups(events_of(copies), kind) for kind in ("all_gather", "all_reduce")]
    check("replicate: groups", sizes == [{2}, {2}], sizes)
    micro = way(work, "micro", 2, "--train.micro", 1)
    expect_close("micro", micro, plain)
    counts = [sum(event["event"] == "unshard" for event in events_of(each)) for each in (micro, plain)]
    check("micro: three microbatches of a step", counts[0] == 3 * counts[1], counts)
    for ranks in 1, 2: # 5 sequences in three parts, 3 in two: the last ones are smaller
        parts = way(work, f"parts{ranks}", ranks, "--train.micro", 2, "--eval.every", 4, "--eval.batches", 2)
        expect_close(f"parts of {ranks} ranks", parts, plain)
    whole = way(work, "whole", 2, "--eval.every", 4, "--eval.batches", 2)
    told = [metrics(each, "eval")[0] for each in (parts, whole)]
    check("parts: evaluation", abs(told[0]["loss"] - told[1]["loss"]) <= 1e-5, told)
    expect_refusal("mesh", train(place(work, "mesh"), "--parallel.mesh", "dp=3", ranks=2), 2,
                   "parallel.mesh needs 3 ranks, but there are 2")


def watch(words):
    """Exit status, peak memory in KiB, and the most threads of a program."""
    process = subprocess.Popen(words, env=clean_environment())
    most = 0
    while True:
        try:
            most = max(most, len(os.listdir(f"/proc/{process.pid}/task")))
        except FileNotFoundError:
            pass
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_maxrss, most
        time.sleep(0.002)


def recompute(work):
    """Less memory, more threads, the same bits."""
    seen = []
    for name, *more in ("kept", ), ("recomputed", "--train.recompute", "block", "--train.threads", 3):
        directory = place(work, name)
        code, peak, threads = watch(tool(
            "fsdp-train", "--run", directory / "run", "--data.path", work / "data.txt", "--model.layers", 6,
            "--model.width", 32, "--model.context", 64, "--train.batch", 32, "--steps", 2, "-q", *more))
        check(f"{name}: exit", code == 0, code)
        seen.append((exact(lines_of(directory)), peak, threads))
    (lines, peak, threads), (lines2, peak2, threads2) = seen
    check("recompute: step lines", lines == lines2 and len(lines) == 2, (lines, lines2))
    check("recompute: memory", peak2 < 0.85 * peak, (peak2, peak))
    check("threads", threads2 == threads + 2, (threads2, threads))


# --- models of [model] ---------------------------------------------------------------------------


def new_models(work):
    """The settings of [model] are in config.json, from which a resume and an export make the model."""
    for name, more, wanted in (
            ("gpt2", ["--model.inner", 40, "--model.tie", "false", "--model.norm_eps", 1e-3,
                      "--model.heads", 2],
             {"n_inner": 40, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3, "n_head": 2,
              "n_layer": 2, "n_embd": 16, "n_positions": CONTEXT}),
            ("llama", ["--model.inner", 24, "--model.kv_heads", 2, "--model.norm_eps", 1e-4,
                       "--model.rope_theta", 500],
             {"intermediate_size": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-4, "rope_theta": 500,
              "tie_word_embeddings": True, "num_attention_heads": 4})):
        directory = trained(work, name, "--model.family", name, "--steps", 1, "--save.also", "hf", *more)
        copy = directory / "run/hf/00000001"
        config = json.loads((copy / "config.json").read_text())
        config.update(config.get("rope_parameters") or {})
        got = {key: config.get(key) for key in wanted}
        check(f"{name}: config.json", got == wanted, got)
        has_head = "lm_head.weight" in read_safetensors(copy / "model.safetensors")
        check(f"{name}: head", has_head != wanted["tie_word_embeddings"])


# --- AdamW and the schedule ----------------------------------------------------------------------


def adamw(work):
    """The first step of AdamW, in numpy, from the gradients that --dump-grads writes."""
    lr, beta1, beta2, eps, decay, clip = 0.01, 0.7, 0.8, 1e-3, 0.5, 0.1
    for which in "matrices", "all":
        directory = place(work, f"adamw {which}")
        for steps in 0, 1:
            done = train(directory, "--steps", steps, "--optim.lr", lr, "--optim.betas", f"{beta1},{beta2}",
                         "--optim.eps", eps, "--optim.weight_decay", decay, "--optim.clip", clip,
                         "--optim.decay", which, "--optim.schedule", "constant",
                         *(["--dump-grads", directory / "g.safetensors"] if steps else []))
            check(f"adamw {which}: exit", done.returncode == 0, done.stderr)
        before, after = (tensors_of(directory / f"run/step-{step:08}", work) for step in (0, 1))
        grads = {name: np.frombuffer(data, "<f4").reshape(shape).astype("f8")
                 for name, (_, shape, data) in read_safetensors(directory / "g.safetensors").items()}
        norm = np.sqrt(sum((g ** 2).sum() for g in grads.values()))
        told = step_lines(directory)[0]["grad_norm"]
        check(f"adamw {which}: norm", clip < norm and abs(norm - told) <= 1e-5 * norm, (norm, told))
        for name, grad in grads.items():
            grad = grad * clip / (norm + 1e-6)
            value, state = before[f"model.{name}"], f"optim.state.{name}"
            decays = decay if which == "all" or value.ndim > 1 else 0
            wanted = value * (1 - lr * decays) - lr * grad / (np.abs(grad) + eps)
            for what, got, right in (("value", after[f"model.{name}"], wanted),
                                     ("exp_avg", after[f"{state}.exp_avg"], (1 - beta1) * grad),
                                     ("exp_avg_sq", after[f"{state}.exp_avg_sq"], (1 - beta2) * grad ** 2)):
                apart = np.abs(got - right).max()
                check(f"adamw {which}: {what} of {name}",
                      apart <= 2e-6 * max(1e-3, np.abs(right).max()), apart)


def schedules(work):
    """The learning rate of each step."""
    lr, warmup, least, steps = 0.02, 2, 0.3, 6

    def wanted(schedule, step):
        done = (step - warmup) / (steps - warmup)
        if step <= warmup:
            return lr * step / warmup
        return {"constant": lr, "linear": lr + (least * lr - lr) * done,
                "cosine": lr * (least + (1 - least) * 0.5 * (1 + np.cos(np.pi * done)))}[schedule]

    for schedule in "cosine", "linear", "constant":
        directory = trained(work, schedule, "--steps", steps, "--optim.lr", lr, "--optim.warmup", warmup,
                            "--optim.min_lr", least, "--optim.schedule", schedule, "--save.every", 0)
        got = [line["lr"] for line in step_lines(directory)]
        right = [wanted(schedule, step) for step in range(1, steps + 1)]
        check(f"{schedule}: lr", np.allclose(got, right, rtol=1e-12, atol=0), (got, right))


# --- data ----------------------------------------------------------------------------------------


def sequences(text, length):
    """Rows of length + 1 bytes, one of them in common with the next."""
    ids = np.frombuffer(text.encode(), "u1").astype("<i8")
    return np.stack([ids[at:at + length + 1] for at in range(0, len(ids) - length, length)])


def order(work):
    """Sequences in order; seeds; the hash of a batch; held-out data."""
    held_out = TEXT[:3000]
    (work / "held-out.txt").write_text(held_out)
    plain = trained(work, "ordered", "--data.shuffle", "false", "--data.val", work / "held-out.txt",
                    "--eval.every", 4, "--eval.batches", 3, "--save.also", "hf")
    rows = sequences(TEXT, CONTEXT)[:4 * BATCH]
    np.save(work / "batches.npy", rows.reshape(4, BATCH, CONTEXT + 1))
    given = place(work, "given")
    done = run(tool("fsdp-train", "--run", given / "run", "--init", plain / "run/hf/00000004", "--batches",
                    work / "batches.npy"))
    check("given: exit", done.returncode == 0, done.stderr)
    batches = [line["batch"] for line in step_lines(plain)]
    check("ordered: batches", batches == [line["batch"] for line in step_lines(given)], batches)
    evaluated, = metrics(plain, "eval")
    check("eval.batches", evaluated["tokens"] == 3 * BATCH * CONTEXT, evaluated)
    np.save(work / "t.npy", sequences(held_out, CONTEXT)[:3 * BATCH])
    told = json.loads(run(tool("fsdp-train", "--eval", plain / "run", "--tokens", work / "t.npy",
                               "--json")).stdout)
    check("eval: data.val", abs(told["loss"] - evaluated["loss"]) <= 1e-7, (told, evaluated))
    for name, *more in ("order", "--data.seed", 2), ("values", "--train.seed", 2):
        other = step_lines(trained(work, f"seed of {name}", *more, "--data.shuffle", "true"))
        base = step_lines(trained(work, f"no seed of {name}"))
        same = [[x[key] for x in other] == [x[key] for x in base] for key in ("batch", "loss")]
        check(f"seed of {name}", same == [name == "values", False], same)


def rows_by_hash(work, model, rows):
    """{hash of a batch of one sequence: its place}"""
    np.save(work / "singles.npy", rows[:, None])
    singles = place(work, "singles")
    done = run(tool("fsdp-train", "--run", singles / "run", "--init", model, "--batches",
                    work / "singles.npy", "--save.every", 0))
    check("singles: exit", done.returncode == 0, done.stderr)
    return {line["batch"]: i for i, line in enumerate(step_lines(singles))}


def epochs(work):
    """Batches continue over the end of an epoch: every epoch has each sequence once, in an order of its own.
    11 sequences in batches of 5: the third batch and the fifth are of two epochs."""
    text = TEXT[:11 * CONTEXT + 1]
    (work / "short.txt").write_text(text)
    more = ["--data.path", work / "short.txt", "--data.val", work / "short.txt", "--eval.every", 0]
    model = trained(work, "model", *more, "--save.also", "hf", "--steps", 1) / "run/hf/00000001"
    rows = sequences(text, CONTEXT)
    where = rows_by_hash(work, model, rows)
    ones = trained(work, "one by one", *more, "--train.batch", 1, "--steps", 33, "--save.every", 0)
    order = [where[line["batch"]] for line in step_lines(ones)]
    each = [order[at:at + 11] for at in range(0, 33, 11)]
    check("epochs", len(rows) == 11 and all(sorted(some) == list(range(11)) for some in each), each)
    check("epochs: orders", each[0] != each[1] != each[2] != each[0], each)
    np.save(work / "fives.npy", rows[order[:30]].reshape(6, 5, -1))
    given = place(work, "fives")
    done = run(tool("fsdp-train", "--run", given / "run", "--init", model, "--batches", work / "fives.npy",
                    "--save.every", 0))
    check("fives: exit", done.returncode == 0, done.stderr)
    fives = trained(work, "of two epochs", *more, "--steps", 6, "--save.every", 0)
    hashes = [[line["batch"] for line in step_lines(directory)] for directory in (fives, given)]
    check("epochs: batches", hashes[0] == hashes[1] and len(hashes[0]) == 6, hashes)


# --- evaluation ----------------------------------------------------------------------------------


def taught(work):
    """A run whose model has learned a little: its logits are far from equal. Made once."""
    directory = work / "taught"
    if not directory.exists():
        trained(work, "taught", "--steps", 60, "--optim.lr", 0.02, "--save.every", 0, "-q")
    return directory / "run"


def logits_of(source, rows, work):
    np.save(work / "rows.npy", rows)
    done = run(tool("fsdp-train", "--eval", source, "--tokens", work / "rows.npy",
                    "--logits-out", work / "l.npy"))
    check("--logits-out", done.returncode == 0, done.stderr)
    return np.load(work / "l.npy").astype("f8")


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def evaluation(work):
    """Loss and perplexity are those of the logits, of text, of token files and of --tokens."""
    source, text = taught(work), TEXT[1000:1777]
    rows = sequences(text, CONTEXT)
    logits = log_softmax(logits_of(source, rows[:, :-1], work))
    loss = -np.take_along_axis(logits, rows[:, 1:, None], -1).mean()
    (work / "eval.txt").write_text(text)
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(text)
    ids = np.frombuffer(text.encode(), "u1").astype("<u2")
    (work / "eval.bin").write_bytes(header.tobytes() + ids.tobytes())
    np.save(work / "rows.npy", rows)
    for options in (["--data", work / "eval.txt"], ["--data", work / "eval.txt", "--np", 2],
                    ["--data", work / "eval.bin"], ["--tokens", work / "rows.npy"]):
        words = tool("fsdp-train", "--eval", source, *options)
        told = json.loads(run([*words, "--json"]).stdout)
        check(f"--eval {options}", abs(told["loss"] - loss) <= 1e-6 and told["tokens"] == rows[:, 1:].size and
              abs(told["perplexity"] / np.exp(loss) - 1) <= 1e-6, (told, loss))
    plain = run(words).stdout
    wanted = f"loss {told['loss']:.6f}  perplexity {told['perplexity']:.4f}  tokens {told['tokens']}\n"
    check("--eval", plain == wanted, plain)


# --- sampling ------------------------------------------------------------------------------------


def truncated(logits, temperature, top_k, top_p):
    """The distribution of transformers: temperature, then the k likeliest, then the first that reach p."""
    order = np.argsort(-logits)
    weights = np.exp(log_softmax(logits[order] / temperature))
    weights[top_k or len(weights):] = 0
    weights /= weights.sum()
    kept = np.cumsum(weights) - weights < top_p
    weights = np.where(kept, weights, 0)
    found = np.zeros(len(logits))
    found[order] = weights / weights.sum()
    return found


def draws(source, rows, count, work, *more):
    np.save(work / "prompts.npy", rows)
    out = work / "ids.npy"
    done = run(tool("fsdp-train", "--sample", source, "--tokens", work / "prompts.npy", "-n", count,
                    "--out", out, *more))
    check(f"--sample {more}", done.returncode == 0, done.stderr)
    return np.load(out)


def sampling(work):
    """Ids of many draws are distributed as the truncated softmax; sharp settings are greedy."""
    count, source = 3000, taught(work)
    prompt = np.frombuffer(b"Sente", "u1").astype("<i8")
    logits = logits_of(source, prompt[None, :2], work)[0, -1]
    prompts = np.tile(prompt[:2], (count, 1))
    for temperature, top_k, top_p, seed in ((0.8, 0, 1, 1), (1.5, 5, 1, 2), (1.2, 0, 0.6, 3), (2, 8, 0.7, 4)):
        ids = draws(source, prompts, 1, work, "--temperature", temperature, "--top-k", top_k,
                    "--top-p", top_p, "--seed", seed)
        told = f"sampling {temperature} {top_k} {top_p}"
        expected = truncated(logits, temperature, top_k, top_p) * count
        counts = np.bincount(ids[:, 0], minlength=len(expected))
        check(f"{told}: only likely ids", counts[expected == 0].sum() == 0, counts[expected == 0].sum())
        usual, rare = expected >= 5, (expected > 0) & (expected < 5)
        expected, counts = (np.append(x[usual], x[rare].sum()) for x in (expected, counts))
        chi = ((counts - expected) ** 2 / np.maximum(expected, 1)).sum()
        freedom = max(1, len(expected) - 2)
        check(f"{told}: chi square", len(expected) > 3 and chi <= freedom + 5 * np.sqrt(2 * freedom),
              (chi, freedom))
    greedy = draws(source, prompt[None], 6, work, "--temperature", 0)
    check("greedy: shape", greedy.shape == (1, 6) and greedy.dtype == "<i8", (greedy.shape, greedy.dtype))
    known = prompt
    for number in range(CONTEXT - len(prompt) + 1):
        best = logits_of(source, known[None], work)[0, -1].argmax()
        check("greedy: id", greedy[0, number] == best, (number, greedy, best))
        known = np.append(known, best)
    for sharp in (["--top-k", 1], ["--top-p", 1e-6]):
        same = draws(source, prompt[None], 6, work, "--temperature", 3, *sharp)
        check(f"{sharp} is greedy", (same == greedy).all(), (same, greedy))
    one, again, other = (draws(source, prompt[None], 6, work, "--temperature", 3, "--top-k", 0,
                               "--seed", seed) for seed in (1, 1, 2))
    check("--seed", (one == again).all() and (one != other).any(), (one, other))
    default, named = (draws(source, prompts[:50], 1, work, *more) for more in
                      ((), ("--temperature", 0.8, "--top-k", 40, "--top-p", 1, "--seed", 1)))
    check("defaults", (default == named).all())


# --- stale saves ---------------------------------------------------------------------------------


def stale(work):
    """Steps that change nothing are an alarm, unless their learning rate is 0."""
    directory = place(work, "stale")
    words = ["--steps", 3, "--save.every", 1, "--optim.schedule", "constant"]
    done = train(directory, *words, "--optim.lr", 1e-300)
    expect_refusal("stale", done, 2, "stale: the model of step 2", "step 1")
    check("stale: the one before", steps_of(directory) == [1], steps_of(directory))
    for how in "retry", "continue": # that is not a failure that may pass
        again = train(place(work, f"stale {how}"), *words, "--optim.lr", 1e-300, "--save.on_error", how)
        expect_refusal(f"stale {how}", again, 2, "stale: the model of step 2")
        check(f"stale {how}: tries", "is not saved" not in again.stderr, again.stderr)
    trained(work, "no rate", *words, "--optim.lr", 0)
    last = trained(work, "no rate at last", "--steps", 3, "--save.every", 2, "--optim.min_lr", 0)
    check("no rate at last: lr", step_lines(last)[-1]["lr"] == 0 and steps_of(last) == [2, 3], steps_of(last))


# --- memory of an export -------------------------------------------------------------------------


def export_memory(work):
    """An export takes less than --mem more than the smallest."""
    peaks = []
    for name, width in ("small", 16), ("large", 320):
        directory = trained(work, name, "--steps", 0, "--model.width", width, "--model.layers", 4)
        out = directory / "hf"
        code, peak, _ = watch(tool("fsdp-convert", directory / "run", out, "--to", "hf", "--mem", "4M", "-q"))
        check(f"export of {name}: exit", code == 0, code)
        peaks.append(peak << 10)
    size = (out / "model.safetensors").stat().st_size
    check("export: memory", peaks[1] - peaks[0] <= 4 << 20 and size > 18 << 20, (peaks, size))


CASES = [start_line, ways, recompute, new_models, adamw, schedules, order, epochs, evaluation, sampling,
         stale, export_memory]


if __name__ == "__main__":
    sys.exit(main(CASES))
