"""A server that speaks the HTTP of SGLang 0.5.17 or vLLM 0.26.0 and decodes by a rule of arithmetic; no model, no GPU.

`python fake_server.py ENGINE [flags of that engine]`. What goes wrong is chosen by the environment variable FAKE, JSON:
start_seconds, exit_at_start, pace (seconds a chunk), without (fields left out of an answer), spawn (a child that lives
on), merge (chunks a merged one), version, finish, cached, accept (drafts accepted in each step, repeated).
"""

import http.server
import json
import os
import subprocess
import sys
import time

FAKE = json.loads(os.environ.get("FAKE", "{}"))
ENGINE, WORDS = (sys.argv[1], sys.argv[2:]) if __name__ == "__main__" else ("sglang", [])
FLAGS = {
    word[2:]: WORDS[i + 1] if i + 1 < len(WORDS) and not WORDS[i + 1].startswith("--") else True
    for i, word in enumerate(WORDS)
    if word.startswith("--")
}
VERSION = FAKE.get("version", {"sglang": "0.5.17", "vllm": "0.26.0"}[ENGINE])
SPECULATIVE = "speculative-algorithm" in FLAGS or "speculative-config" in FLAGS
COUNTS = {"drafts": 0, "accepted": 0, "by_position": [0] * 15}


def token(position: int, seed: int) -> int:
    """The token at a position: every method's, whatever it drafts."""
    return 100 + (position * 7 + seed) % 900


def decode(prompt: list[int], limit: int, seed: int, ends: list[int]):
    """Yield (tokens so far, steps, histogram, finish) after prefill and after every step."""
    tokens, steps, histogram, finish = [], 0, [0] * 16, None

    def emit(count: int) -> None:
        nonlocal finish
        for _ in range(count):
            tokens.append(token(len(prompt) + len(tokens), seed))
            finish = "stop" if tokens[-1] in ends else "length" if len(tokens) == limit else None
            if finish:
                return

    emit(1)
    yield list(tokens), steps, list(histogram), finish
    while not finish:
        accepted = FAKE.get("accept", [3, 0, 2])[steps % len(FAKE.get("accept", [3, 0, 2]))] if SPECULATIVE else 0
        emit(accepted + 1)
        steps, histogram[accepted] = steps + 1, histogram[accepted] + 1
        if SPECULATIVE:
            COUNTS["drafts"] += 1
            COUNTS["accepted"] += accepted
            for place in range(accepted):
                COUNTS["by_position"][place] += 1
        yield list(tokens), steps, list(histogram), finish


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, value, status: int = 200, kind: str = "application/json") -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            self.reply("", 200 if time.time() - START >= FAKE.get("start_seconds", 0) else 503)
        elif self.path == "/server_info":
            states = [{"memory_usage": {"weight": 1.5, "kvcache": 2.5}}]
            algorithm = FLAGS.get("speculative-algorithm")
            known = {"version": VERSION, "speculative_algorithm": algorithm, "attention_backend": "triton"}
            self.reply({**known, "model_path": "/secret/place", "internal_states": states})
        elif self.path == "/version":
            self.reply({"version": VERSION})
        elif self.path == "/metrics":
            self.reply(metrics(), kind="text/plain")
        else:
            self.reply({"error": "no such path"}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("requests.jsonl", "a") as log:
            log.write(json.dumps({"path": self.path, **body}) + "\n")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        write = sglang if ENGINE == "sglang" else vllm
        for chunk in write(body):
            time.sleep(FAKE.get("pace", 0))
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def sglang(body: dict):
    sampling, without = body["sampling_params"], FAKE.get("without", [])
    seed, prompt = sampling["custom_params"]["tfm_seed"], body["input_ids"]
    states = list(decode(prompt, sampling["max_new_tokens"], seed, sampling["stop_token_ids"]))
    for number, (tokens, steps, histogram, finish) in enumerate(states):
        if number % FAKE.get("merge", 1) and not finish:
            continue
        meta = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "cached_tokens": FAKE.get("cached", 0)}
        reason = FAKE.get("finish", finish) if finish else None
        meta["finish_reason"] = {"type": reason} if reason else None
        if SPECULATIVE and steps:
            meta |= {"spec_verify_ct": steps, "spec_correct_drafts_histogram": list(histogram)}
        yield {"output_ids": tokens, "meta_info": {key: value for key, value in meta.items() if key not in without}}


def vllm(body: dict):
    last, prompt = 0, body["prompt"]
    states = decode(prompt, body["max_tokens"], body["seed"] % 1_000_003, body["stop_token_ids"])
    for tokens, _, _, finish in states:
        choice = {"token_ids": tokens[last:], "finish_reason": finish, "text": ""}
        last = len(tokens)
        yield {"choices": [choice], "usage": None}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": last}
    yield {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": FAKE.get("cached", 0)}}}


def metrics() -> str:
    if "metrics" in FAKE.get("without", []):
        return "# nothing\n"
    labels = 'engine="0",model_name="target"'
    lines = [f"vllm:generation_tokens_total{{{labels}}} 1.0"]
    if SPECULATIVE:
        lines += [f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(COUNTS['drafts'])}"]
        lines += [f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(COUNTS['accepted'])}"]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{{labels},position="{p}"}} {float(n)}' for p, n in enumerate(COUNTS["by_position"])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    START = time.time()
    if "exit_at_start" in FAKE:
        print("RuntimeError: out of memory on this card", flush=True)
        sys.exit(FAKE["exit_at_start"])
    if FAKE.get("spawn"):  # as schedulers are: a process of its own that ignores the polite signal
        child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", child])
    http.server.ThreadingHTTPServer((FLAGS["host"], int(FLAGS["port"])), Handler).serve_forever()
