//! `proto/service-config.json` says what the comments of the protos say: what callers may repeat, and how long they wait for it.
//!
//! `GANTRY_BLESS=1 cargo test -p gantry-rpc --test rpc service_config` writes it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use prost::Message;
use prost_types::FileDescriptorSet;
use serde_json::{Value, json};

fn proto() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto")
}

/// The comment before `rpc NAME(` in the service, as one line.
fn comment(text: &str, service: &str, rpc: &str) -> String {
    let service = text.split(&format!("\nservice {service} {{")).nth(1).expect("the service");
    let before = service.split(&format!("rpc {rpc}(")).next().expect("what is before it");
    let lines: Vec<_> =
        before.lines().rev().skip(1).map(str::trim).take_while(|l| l.starts_with("//")).collect();
    lines.iter().rev().map(|line| line.trim_start_matches('/').trim()).collect::<Vec<_>>().join(" ")
}

/// Seconds. `None`: it says that there is no deadline.
fn deadline(rpc: &str, comment: &str) -> Option<u32> {
    let said =
        comment.split("Default deadline: ").nth(1).unwrap_or_else(|| panic!("{rpc} names no deadline"));
    let first = said.split([' ', '.']).next().expect("a word");
    (first != "none").then(|| first.parse().unwrap_or_else(|_| panic!("{rpc}: {first} s?")))
}

/// What callers may repeat, by how long they wait for it; calls whose caller streams cannot be repeated by a library.
fn repeatable() -> BTreeMap<Option<u32>, Vec<Value>> {
    let descriptors = FileDescriptorSet::decode(gantry_rpc::DESCRIPTORS).expect("descriptors");
    let mut methods: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for file in descriptors.file.iter().filter(|file| file.package().starts_with("gantry.")) {
        let text = std::fs::read_to_string(proto().join(file.name())).expect("the file");
        for service in &file.service {
            for method in service.method.iter().filter(|method| !method.client_streaming()) {
                let comment = comment(&text, service.name(), method.name());
                let principal = comment.split("Principal: ").nth(1).unwrap_or_default();
                let calls =
                    ["caller", "operator", "holder of a ticket"].iter().any(|who| principal.starts_with(who));
                if !calls || !comment.contains("Safe to repeat") {
                    continue;
                }
                let name = json!({ "service": format!("{}.{}", file.package(), service.name()), "method": method.name() });
                methods.entry(deadline(method.name(), &comment)).or_default().push(name);
            }
        }
    }
    methods
}

#[test]
fn callers_repeat_what_the_protos_allow_and_nothing_else() {
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
    assert!(!expected.to_string().contains("\"StartAttempt\""), "that is the gateways'");

    let file = proto().join("service-config.json");
    let text = serde_json::to_string_pretty(&expected).expect("text") + "\n";
    if std::env::var_os("GANTRY_BLESS").is_some() {
        std::fs::write(&file, &text).expect("written");
    }
    assert_eq!(std::fs::read_to_string(&file).expect("proto/service-config.json"), text);
}
