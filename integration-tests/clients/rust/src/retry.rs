//! Implements proto/service-config.json, because tonic does not read gRPC service configs.

use std::sync::LazyLock;
use std::time::Duration;

use serde_json::Value;
use tonic::{Code, Response, Status};

static CONFIG: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../../../../proto/service-config.json")).expect("it is JSON")
});

/// Makes an idempotent call, and repeats it while the service is unavailable.
pub async fn retry<T>(
    service: &str,
    method: &str,
    call: impl AsyncFn() -> Result<Response<T>, Status>,
) -> Result<T, Status> {
    let names = |config: &Value| config["name"].as_array().cloned().unwrap_or_default();
    let is_it = |name: &Value| name["service"] == service && name["method"] == method;
    let configs = CONFIG["methodConfig"].as_array().expect("a list");
    let config = configs.iter().find(|config| names(config).iter().any(is_it));
    let policy = config.map_or(&Value::Null, |config| &config["retryPolicy"]);

    let seconds = |value: &Value| {
        let text = value.as_str().expect("a duration");
        text.trim_end_matches('s').parse::<f64>().expect("seconds")
    };
    for attempt in 1.. {
        match call().await {
            Ok(response) => return Ok(response.into_inner()),
            Err(status)
                if status.code() != Code::Unavailable
                    || policy["maxAttempts"].as_u64().unwrap_or(1) <= attempt =>
            {
                return Err(status);
            }
            Err(_) => {
                let factor = policy["backoffMultiplier"].as_f64().expect("a number");
                let pause = seconds(&policy["initialBackoff"]) * factor.powf((attempt - 1) as f64);
                let pause = pause.min(seconds(&policy["maxBackoff"])) * rand::random::<f64>();
                tokio::time::sleep(Duration::from_secs_f64(pause)).await;
            }
        }
    }
    unreachable!("it returns")
}
