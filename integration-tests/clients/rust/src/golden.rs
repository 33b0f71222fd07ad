//! Checks that each message of the golden corpus equals its JSON.

use std::path::Path;

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};
use serde_json::Value;

use crate::gantry::{artifacts, runtime, scheduler, streamer};

/// Encodes `encoded` again after the generated code has decoded it.
fn through_generated_code(name: &str, encoded: &[u8]) -> Vec<u8> {
    macro_rules! decode {
        ($($package:ident :: $message:ident,)+) => {
            match name {
                $(concat!("gantry.", stringify!($package), ".v1.", stringify!($message)) => {
                    $package::v1::$message::decode(encoded).expect("it decodes").encode_to_vec()
                })+
                _ => panic!("{name} is not listed here"),
            }
        };
    }
    decode! {
        artifacts::PutBuildRequest,
        runtime::AttachRequest,
        runtime::AttachResponse,
        runtime::Entry,
        runtime::ReadArchiveResponse,
        runtime::WriteArchiveRequest,
        scheduler::Exit,
        scheduler::ExplainRequest,
        scheduler::ExplainResponse,
        scheduler::Image,
        scheduler::WatchResponse,
        scheduler::WorkloadSpec,
        streamer::UploadRequest,
        streamer::UploadResponse,
    }
}

#[test]
fn each_message_is_what_its_json_says() {
    let descriptors: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
    let pool = DescriptorPool::decode(descriptors).expect("descriptors");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden");
    let mut count = 0;
    for entry in std::fs::read_dir(corpus).expect("the corpus") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "binpb") {
            continue;
        }
        let encoded = std::fs::read(&path).expect("a message");
        let text = std::fs::read_to_string(path.with_extension("json")).expect("its JSON");
        let expected: Value = serde_json::from_str(&text).expect("JSON");
        let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        let (name, _) = stem.rsplit_once('.').expect("a type and a case");
        if name == "google.rpc.Status" {
            let status = tonic_types::Status::decode(encoded.as_slice()).expect("it decodes");
            let info = tonic_types::pb::ErrorInfo::decode(status.details[0].value.as_slice()).expect("it decodes");
            let detail = &expected["details"][0];
            assert_eq!((status.code, &status.message), (9, &expected["message"].as_str().unwrap().to_owned()));
            assert_eq!(detail["@type"], *status.details[0].type_url);
            assert_eq!((&detail["reason"], &detail["domain"]), (&info.reason.into(), &info.domain.into()));
            assert_eq!(detail["metadata"]["one"], *info.metadata["one"]);
        } else {
            let encoded = through_generated_code(name, &encoded);
            let descriptor = pool.get_message_by_name(name).expect("it is in our protos");
            let decoded = DynamicMessage::decode(descriptor, encoded.as_slice()).expect("it decodes");
            assert_eq!(serde_json::to_value(&decoded).expect("JSON"), expected, "{stem}");
        }
        count += 1;
    }
    assert!(count > 25, "only {count} messages");
}
