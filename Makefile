# Two commands on a fresh machine: `make train` and `make test`. Both make .venv themselves.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN = .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: train test check sweep study parity golden bench bench-backend bench-split bench-context network-bench regret memory pictures gpu-check fit-planner validate-planner compare-planners clean

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH) numpy
	$(BIN)/pip install --quiet -e .
	touch $@

.venv/developed: .venv/installed
	$(BIN)/pip install --quiet -e '.[dev]' $(TORCH)
	touch $@

train: .venv/installed          ## the main job: a small GPT on Python's own standard library
	$(BIN)/soli train

test: .venv/developed check     ## everything: style, types, structure, and all tests but those of `make sweep`
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist loadfile # hundreds of processes read what one has compiled

check: .venv/developed
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/mypy -p soli

sweep: .venv/developed          ## the cases that `make test` leaves out: more of the same, on more ranks, or slower -> benchmarks/results/sweep.json
	$(BIN)/python benchmarks/swept_cases.py

parity: .venv/developed         ## every case under every plan -> docs/parity.md, benchmarks/results/parity.json
	$(BIN)/python benchmarks/parity.py

golden: .venv/developed         ## the layouts that tests compare with -> tests/golden/
	$(BIN)/python tests/layouts.py

bench: .venv/developed          ## step time and memory beside the peers -> benchmarks/results/
	$(BIN)/python benchmarks/envs.py
	$(BIN)/python benchmarks/run.py --sizes small --steps 12 --rounds 3
	$(BIN)/python benchmarks/run.py --sizes big --steps 5 --warmup 1 --rounds 3
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/resume.py

BOTH = ddp fsdp2-noreshard fsdp2 tp tp-dtensor gpipe 1f1b interleaved zero-bubble zbv dualpipev \
	soli-z0 soli-z1 soli-z2 soli-z3
PEERS = accelerate-ddp accelerate-fsdp2 fabric-ddp fabric-fsdp2 \
	deepspeed-z0 deepspeed-z1 deepspeed-z2 deepspeed-z3 colossalai-ddp colossalai-z1 colossalai-z2

bench-backend: .venv/developed  ## the local backend beside gloo: calls, waiting, step times -> benchmarks/results/
	$(BIN)/python benchmarks/envs.py
	$(BIN)/python benchmarks/backend.py --rounds 2
	$(BIN)/python benchmarks/waiting.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/run.py --sizes small --steps 8 --warmup 2 --rounds 2 \
		--out benchmarks/results/backend-steps \
		--only $(foreach name,$(BOTH),$(name)-gloo $(name)-local) $(PEERS)

TENSOR = tp tp-sp tp-dtensor megatron-tp megatron-tp-sp soli-tp soli-tp-sp hf-tp-plan soli-hf-tp
PIPELINES = gpipe 1f1b zbh1 interleaved zbv dualpipev

bench-split: .venv/developed    ## tensor, sequence and pipeline parallelism beside others: step times, collectives
	$(BIN)/python benchmarks/envs.py megatron
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/run.py --sizes small --steps 8 --rounds 3 --out benchmarks/results/tensor-steps \
		--only $(foreach name,$(TENSOR),$(name)-gloo $(name)-local)
	$(BIN)/python benchmarks/run.py --sizes small --steps 8 --warmup 2 --rounds 2 --out benchmarks/results/pipeline-steps \
		--only $(foreach name,$(PIPELINES),$(name)-local soli-$(name)-local)

fit-planner: .venv/developed    ## the planner's constants of published measurements -> src/soli/planner/cost/constants.toml
	$(BIN)/python benchmarks/planner.py --fit

validate-planner: .venv/developed ## how far the planner is off, where experts' plans stand, how long it searches
	$(BIN)/python benchmarks/planner.py --validate
	$(BIN)/python benchmarks/experts.py
	$(BIN)/python benchmarks/search.py

compare-planners: .venv/developed ## other planners on the same rows; CLONES="--clone calculon=FOLDER ..." for what the index has not
	$(BIN)/python benchmarks/envs.py calculon llm-analysis simumax galvatron
	$(BIN)/python benchmarks/planners.py $(CLONES)

STUDY = benchmarks/results/study
STUDIED = $(foreach clone,$(wildcard $(HISTORIES)/*),$(firstword $(wildcard $(clone)/repo) $(clone)))

study: .venv/developed          ## the bug study of whole clones: make study HISTORIES=folder-of-clones -> benchmarks/results/study/
	mkdir -p build
	rm -f build/bugs.db
	$(BIN)/soli bugs mine $(STUDIED) --out build/bugs.db
	$(BIN)/soli bugs classify $(STUDIED) --db build/bugs.db
	$(BIN)/soli bugs report --db build/bugs.db --labels benchmarks/bugs/labels.csv --sample benchmarks/bugs/sample.json --out $(STUDY)

regret: .venv/developed        ## plan=auto beside every plan measured, on three networks: needs root, an hour -> benchmarks/results/
	$(BIN)/python benchmarks/regret.py

memory: .venv/developed        ## rehearsed memory beside tracked memory, rows that cover every pair of choices -> benchmarks/results/
	$(BIN)/python benchmarks/rehearsed.py
	$(BIN)/python benchmarks/formulas.py --plans 30

network-bench: .venv/developed  ## layouts over slow networks, in network namespaces: needs root -> benchmarks/results/
	$(BIN)/python benchmarks/network/measure.py
	$(BIN)/python benchmarks/network/run.py
	$(BIN)/python benchmarks/network/run.py --rates none 1gbit --latencies 0 1 10 --out benchmarks/results/network-latency
	$(BIN)/python benchmarks/network/run.py --per-host 2 --rates none 1gbit 100mbit --out benchmarks/results/network-two-level
	$(BIN)/python benchmarks/network/run.py --backend gloo --sequence 1024 --batch 1 --rates none 1gbit 100mbit \
		--plans cp=4 cp=4,context=ulysses cp=4,context=scores --out benchmarks/results/network-context
	$(BIN)/python benchmarks/network/headline.py

bench-context: .venv/developed  ## context parallelism: step times beside one process, the longest sequence -> benchmarks/results/
	$(BIN)/python benchmarks/context.py

pictures: .venv/installed       ## the documents' pictures, from the results -> docs/pictures/
	$(BIN)/python docs/draw.py
	$(BIN)/python docs/draw_splits.py
	$(BIN)/python docs/draw_network.py

gpu-check:                      ## parity and times on CUDA devices -> benchmarks/results/gpu*; refuses elsewhere
	@$(PYTHON) -c "import importlib.util as u, sys; ok = u.find_spec('torch') and __import__('torch').cuda.is_available(); sys.exit(None if ok else 'make gpu-check: needs a PyTorch with a CUDA device, and there is none here')"
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_parity.py
	PYTHONPATH=src $(PYTHON) benchmarks/gpu.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
