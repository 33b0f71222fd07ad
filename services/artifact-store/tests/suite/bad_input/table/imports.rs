//! Invalid requests about imports.

use super::*;

pub(super) async fn calls(world: &World<'_>) -> Vec<Call> {
    let (suite, here) = (world.suite, &world.here);
    let provided = |resource_type: &str| pb::WorkerProvided {
        resource_type: resource_type.to_owned(),
        version: "1".to_owned(),
        path: format!("/opt/{resource_type}"),
    };
    let prepare = |resource_type: &str| pb::PrepareImportRequest {
        session_credential: here.credential.clone(),
        provided: Some(provided(resource_type)),
    };
    let mut begun = Vec::new();
    for resource_type in ["git", "s3", "time"] {
        let prepared = suite.inventory().prepare_import(prepare(resource_type)).await.expect("prepared");
        begun.push(prepared.into_inner().volume_handle);
    }
    let [to_complete, to_fail, completed] = &begun[..] else { panic!("three") };
    let complete = |volume: &str| pb::CompleteImportRequest {
        session_credential: here.credential.clone(),
        volume_handle: volume.to_owned(),
        size_bytes: (1 << 63) - 1,
        digest: digest(7).as_bytes().to_vec().into(),
    };
    suite.inventory().complete_import(complete(completed)).await.expect("complete");
    let fail = pb::FailImportRequest {
        session_credential: here.credential.clone(),
        volume_handle: to_fail.clone(),
        reason: "x".repeat(1000),
    };
    let list =
        pb::ListImportsRequest { worker_id: here.worker.to_string(), page_size: 1, ..Default::default() };
    let answer = suite.inventory().list_imports(list.clone()).await.expect("a page");
    let page_token = answer.into_inner().next_page_token;
    let other = &world.other_prepared.volumes[0].volume_handle;
    vec![
        Call::new(
            "Inventory.PrepareImport",
            [prepare("registry-image")],
            [
                credential("session_credential", suite, here),
                vec![cleared("provided", "provided")],
                invalid(
                    "provided.resource_type",
                    "overlong",
                    text("x".repeat(1025)),
                    "provided.resource_type",
                ),
                invalid("provided.resource_type", "with NUL", text("a\0b"), "provided.resource_type"),
                invalid("provided.version", "overlong", text("x".repeat(65537)), "provided.version"),
                invalid("provided.version", "with NUL", text("a\0b"), "provided.version"),
                invalid("provided.path", "missing", text(""), "provided.path"),
                invalid("provided.path", "overlong", text("x".repeat(4097)), "provided.path"),
                invalid("provided.path", "with NUL", text("a\0b"), "provided.path"),
            ],
        ),
        Call::new(
            "Inventory.CompleteImport",
            [complete(to_complete)],
            [
                credential("session_credential", suite, here),
                but("session_credential", "of another worker", &world.there.credential, VolumeNotFound),
                id("volume_handle"),
                but("volume_handle", "unknown", WorkloadId::new(), VolumeNotFound),
                invalid("volume_handle", "of no import", text(other), "volume_handle"),
                given(
                    |messages| put(messages, "digest", Some(&Value::Bytes(vec![9; 32].into()))),
                    [invalid("volume_handle", "of other bytes", text(completed), "digest")],
                ),
                digests("digest"),
                invalid("size_bytes", "absurd", Value::U64(u64::MAX), "size_bytes"),
            ],
        ),
        Call::new(
            "Inventory.FailImport",
            [fail],
            [
                credential("session_credential", suite, here),
                but("session_credential", "of another worker", &world.there.credential, VolumeNotFound),
                id("volume_handle"),
                but("volume_handle", "unknown", WorkloadId::new(), VolumeNotFound),
                invalid("volume_handle", "of no import", text(other), "volume_handle"),
                invalid("volume_handle", "that was completed", text(completed), "volume_handle"),
                super::reason("reason"),
            ],
        ),
        Call::new(
            "Inventory.ListImports",
            [pb::ListImportsRequest { page_token, ..list }],
            [
                malformed("worker_id"),
                but("worker_id", "that the token is not of", WorkerId::new(), InvalidPageToken),
                invalid("page_size", "absurd", Value::U32(1001), "page_size"),
                but("page_token", "malformed", "?", InvalidPageToken),
                but("page_token", "overlong", "A".repeat(100_000), InvalidPageToken),
                but("page_token", "of another list", token_of_volumes(suite).await, InvalidPageToken),
            ],
        ),
    ]
}
