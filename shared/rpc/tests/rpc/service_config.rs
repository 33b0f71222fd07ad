//! `proto/service-config.json` states which calls a library may repeat, and their deadlines. It is
//! generated from the comments of the protos.
//!
//! `GANTRY_BLESS=1 cargo test -p gantry-rpc --test rpc service_config` writes the file.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::contract::{contracts, proto};

/// Idempotent calls of callers and operators, by their deadline. A library cannot repeat a call
/// with a stream of requests.
fn repeatable() -> BTreeMap<Option<u32>, Vec<Value>> {
    let mut methods: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for contract in contracts() {
        let is_for_callers = matches!(contract.callers[0].as_str(), "caller" | "operator");
        if is_for_callers && contract.idempotent && !contract.streams_requests {
            let service = format!("{}.{}", contract.package, contract.service);
            let name = json!({ "service": service, "method": contract.rpc });
            methods.entry(contract.deadline).or_default().push(name);
        }
    }
    methods
}

#[test]
fn service_config_repeats_only_idempotent_calls() {
    let policy = json!({
        "maxAttempts": 5,
        "initialBackoff": "0.2s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    });
    let configs = repeatable().into_iter().map(|(deadline, names)| {
        let mut config = json!({ "name": names });
        if let Some(seconds) = deadline {
            config["timeout"] = format!("{seconds}s").into();
        }
        config["retryPolicy"] = policy.clone();
        config
    });
    let expected = json!({ "methodConfig": configs.collect::<Vec<_>>() });
    assert!(expected.to_string().contains("\"Submit\""), "{expected}");
    assert!(!expected.to_string().contains("\"StartAttempt\""), "only gateways call StartAttempt");

    let file = proto().join("service-config.json");
    let text = serde_json::to_string_pretty(&expected).expect("JSON") + "\n";
    if std::env::var_os("GANTRY_BLESS").is_some() {
        std::fs::write(&file, &text).expect("the file is written");
    }
    assert_eq!(std::fs::read_to_string(&file).expect("proto/service-config.json"), text);
}
