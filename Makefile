# check: static checks. test: all tests. Both install missing packages if they run as root.
.PHONY: all check checks fmt fmt-check house docs clippy doc deny deny-now proto contracts test full soak chaos edits fuzz clients clients-now client-tools compose-test images bench up

SHELL := /bin/bash
TOOLS := $(CURDIR)/target/tools
BUF_VERSION := 1.75.0
GRPCURL_VERSION := 1.9.4
DENY_VERSION := 0.20.2
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
CONTRACTS := integration-tests/contracts/$(VERSION).binpb
MDBOOK_VERSION := 0.5.4

all: check test

up:
	cargo run --release -- up

fmt:
	cargo fmt --all

CHECKS := fmt-check house clippy doc deny proto
check: $(CHECKS)

# Prints the names of the checks, which can be run one by one.
checks:
	@echo $(CHECKS)

fmt-check:
	cargo fmt --all --check

# Checks layers, sizes, links, dependencies and subjects of commits.
house:
	integration-tests/setup.sh house
	cd integration-tests/house && python3 -m unittest --quiet
	integration-tests/house/house.py

# The documentation as a book, in target/book, with its links checked.
docs: $(TOOLS)/bin/mdbook
	$(TOOLS)/bin/mdbook build docs
	integration-tests/house/book.py check target/book

$(TOOLS)/bin/mdbook:
	# Without the features that serve a book: they need many more crates.
	cargo install mdbook --version $(MDBOOK_VERSION) --locked --debug --no-default-features --features search --root $(TOOLS)

clippy:
	cargo clippy --workspace --all-targets --locked -- -D warnings

# Module docs may link to private items, because only developers read them.
doc:
	RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" cargo doc --workspace --no-deps --document-private-items --locked

# Advisories are not checked, because their database is not reachable from all machines.
deny:
	integration-tests/unless-passed.sh deny Cargo.lock Cargo.toml deny.toml -- $(MAKE) --no-print-directory deny-now

deny-now: $(TOOLS)/bin/cargo-deny
	$(TOOLS)/bin/cargo-deny --locked check licenses bans sources

$(TOOLS)/bin/cargo-deny:
	# A debug build compiles faster, and the tool runs for seconds.
	cargo install cargo-deny --version $(DENY_VERSION) --locked --debug --root $(TOOLS)

# Lints the contracts, and rejects changes that break clients of the contracts of this version.
proto: $(TOOLS)/node_modules/.bin/buf
	$(TOOLS)/node_modules/.bin/buf lint
	$(TOOLS)/node_modules/.bin/buf breaking --against $(CONTRACTS)

# Stores the contracts of this version. Run it once for each version, after the version in Cargo.toml was raised.
contracts: $(TOOLS)/node_modules/.bin/buf
	$(TOOLS)/node_modules/.bin/buf build --exclude-source-info --output $(CONTRACTS)

$(TOOLS)/node_modules/.bin/buf:
	integration-tests/setup.sh node
	npm install --silent --no-audit --no-fund --prefix $(TOOLS) @bufbuild/buf@$(BUF_VERSION)

test:
	integration-tests/setup.sh test
	integration-tests/run.sh

# All checks and tests, including slow tests, more seeds, clients in all languages, and compose.yaml.
full: export GANTRY_FULL := 1
full: export GANTRY_SEEDS ?= 8
full: check docs test clients compose-test

# Random operations on the artifact store, compared with its model on both databases. Runs for GANTRY_SOAK hours (1) or until a failure.
soak:
	integration-tests/setup.sh test
	cargo test -p artifact-store --test suite --locked -- --ignored --nocapture --test-threads=2 soak

# Kills and freezes of the four services and of PostgreSQL while commands run. Runs for GANTRY_CHAOS seconds (180).
chaos:
	integration-tests/setup.sh test
	cargo build --workspace --bins --locked
	python3 -B integration-tests/chaos.py --seconds $${GANTRY_CHAOS:-180}

# Edits of a tree of 2 GiB and runs with it, as in a day, on a disk of 20 GiB. Takes about 12 minutes.
edits:
	integration-tests/setup.sh test
	cargo build --release --workspace --bins --locked
	python3 -B integration-tests/edits.py --release

# Mutated manifests, archives, compressed streams, responses of workers, tokens and image metadata. Runs for GANTRY_SOAK hours (1) or until a failure.
fuzz: export GANTRY_SOAK ?= 1
fuzz:
	cargo test -p gantry-transfer --test transfer --locked hostile_trees
	cargo test -p gantry-concourse --test concourse --locked hostile
	cargo test -p gantry-rpc --test rpc --locked hostile_tokens
	cargo test -p runtime-gateway --lib --locked -- hostile

# Clients in other languages and the grpcurl examples, against the four services and against a cluster in one process.
clients:
	integration-tests/unless-passed.sh clients proto integration-tests/clients docs/clients.md -- $(MAKE) --no-print-directory clients-now

clients-now: client-tools
	cargo build --workspace --bins --locked
	integration-tests/clients/run.sh

client-tools: $(TOOLS)/node_modules/.bin/buf $(TOOLS)/bin/grpcurl
	integration-tests/setup.sh clients

$(TOOLS)/bin/grpcurl:
	integration-tests/setup.sh go
	GOBIN=$(TOOLS)/bin go install github.com/fullstorydev/grpcurl/cmd/grpcurl@v$(GRPCURL_VERSION)

# Test of compose.yaml with images of the binaries of this tree. Starts a container engine if none runs.
compose-test:
	integration-tests/unless-passed.sh compose proto docker compose.yaml integration-tests/compose.sh -- integration-tests/compose.sh

# Release images, built by docker/Dockerfile. Base images come from a registry, or from docker/base-images.sh.
IMAGES ?= gantry
DOCKER ?= docker
images:
	for target in scheduler artifact-store streamer runtime-gateway worker; do \
		$(DOCKER) build -f docker/Dockerfile --target $$target -t $(IMAGES)/$$target . || exit 1; \
	done

bench:
	integration-tests/setup.sh test
	integration-tests/bench.sh
