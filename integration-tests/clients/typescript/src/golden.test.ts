// Checks that TypeScript decodes the golden corpus as Rust does.

import { ok } from "node:assert";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

import { createRegistry, equals, fromBinary, fromJson } from "@bufbuild/protobuf";

import { file_gantry_artifacts_v1_artifacts } from "../gen/gantry/artifacts/v1/artifacts_pb.js";
import { file_gantry_runtime_v1_containers } from "../gen/gantry/runtime/v1/containers_pb.js";
import { file_gantry_runtime_v1_volumes } from "../gen/gantry/runtime/v1/volumes_pb.js";
import { file_gantry_scheduler_v1_placements } from "../gen/gantry/scheduler/v1/placements_pb.js";
import { file_gantry_scheduler_v1_workloads } from "../gen/gantry/scheduler/v1/workloads_pb.js";
import { file_gantry_streamer_v1_streamer } from "../gen/gantry/streamer/v1/streamer_pb.js";
import { file_google_rpc_error_details } from "../gen/google/rpc/error_details_pb.js";
import { file_google_rpc_status } from "../gen/google/rpc/status_pb.js";

const registry = createRegistry(
  file_gantry_artifacts_v1_artifacts,
  file_gantry_runtime_v1_containers,
  file_gantry_runtime_v1_volumes,
  file_gantry_scheduler_v1_placements,
  file_gantry_scheduler_v1_workloads,
  file_gantry_streamer_v1_streamer,
  file_google_rpc_error_details,
  file_google_rpc_status,
);
const golden = new URL("../../../golden/", import.meta.url);
const names = readdirSync(golden).filter((name) => name.endsWith(".binpb"));

test("each message is what its JSON says", () => {
  ok(names.length > 25);
  for (const name of names) {
    const schema = registry.getMessage(name.split(".").slice(0, -2).join("."));
    ok(schema, name);
    const decoded = fromBinary(schema, readFileSync(new URL(name, golden)));
    const text = readFileSync(new URL(name.replace(/binpb$/, "json"), golden), "utf8");
    const expected = fromJson(schema, JSON.parse(text), { registry });
    ok(equals(schema, decoded, expected), name);
  }
});
