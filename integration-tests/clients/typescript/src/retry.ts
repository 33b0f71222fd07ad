// Implements proto/service-config.json, because Connect does not read gRPC service configs.

import { readFileSync } from "node:fs";
import { setTimeout } from "node:timers/promises";

import { Code, ConnectError, type Interceptor } from "@connectrpc/connect";

interface Config {
  methodConfig: {
    name: { service: string; method: string }[];
    retryPolicy: { maxAttempts: number; initialBackoff: string; maxBackoff: string; backoffMultiplier: number };
  }[];
}

const file = new URL("../../../../../proto/service-config.json", import.meta.url);
const config = JSON.parse(readFileSync(file, "utf8")) as Config;

const seconds = (text: string) => Number.parseFloat(text) * 1000;

/** Repeats an idempotent call while the service is unavailable. */
export function retry(): Interceptor {
  return (next) => async (request) => {
    const policy = config.methodConfig.find(({ name }) =>
      name.some(({ service, method }) => service === request.service.typeName && method === request.method.name),
    )?.retryPolicy;
    for (let attempt = 1; ; attempt++) {
      try {
        return await next(request);
      } catch (error) {
        const unavailable = ConnectError.from(error).code === Code.Unavailable;
        if (policy === undefined || !unavailable || attempt >= policy.maxAttempts) throw error;
        const pause = seconds(policy.initialBackoff) * policy.backoffMultiplier ** (attempt - 1);
        await setTimeout(Math.random() * Math.min(pause, seconds(policy.maxBackoff)));
      }
    }
  };
}
