//! Tests of imports on a fake worker, with a fake artifact store.

use std::path::Path;

use domain::worker::Session;
use testing::conformance;
use testing::fake::FakeWorker;

use super::*;
use crate::test_support::store::{Answer, Store, StoreCall, session};
use crate::test_support::{FakeGateways, TestWorker, UNREACHABLE, within};
use crate::worker::session::OpenSession;
use rpc::pb::artifacts as pb;
use runtime::WorkerProvided;

/// A gateway with worker-provided items, and the fake store.
struct Suite {
    machine: Arc<FakeWorker>,
    worker: TestWorker,
    store: Store,
    session: OpenSession,
}

fn git(path: &Path) -> WorkerProvidedPath {
    let what = WorkerProvided::ResourceType("git".to_owned());
    WorkerProvidedPath { what, version: "1".to_owned(), path: path.display().to_string() }
}

impl Suite {
    async fn start(worker_provided: Vec<WorkerProvidedPath>) -> Self {
        let store = Store::start().await;
        let machine = FakeWorker::providing(worker_provided, false);
        let worker = machine.gateway(UNREACHABLE, &store.endpoint);
        let session = session("credential");
        worker.session.set(Some(session.clone()));
        worker.tasks.spawn(import_forever(worker.transfers.clone(), worker.imports.clone()));
        Self { machine, worker, store, session }
    }

    /// Receives the next call, which must prepare an import.
    async fn prepare(&mut self) -> (pb::PrepareImportRequest, Answer<pb::PrepareImportResponse>) {
        match self.store.next_call().await {
            StoreCall::PrepareImport(request, answer) => (request, answer),
            _ => panic!("an unexpected call"),
        }
    }

    /// Answers the next call to prepare an import with this volume.
    async fn begin(&mut self, artifact: ArtifactId, volume: VolumeHandle) -> pb::PrepareImportRequest {
        let (request, answer) = self.prepare().await;
        answer.send(Ok(yours(artifact, volume))).expect("the gateway waits");
        request
    }

    async fn complete(&mut self, artifact: ArtifactId) -> pb::CompleteImportRequest {
        let (request, answer) = match self.store.next_call().await {
            StoreCall::CompleteImport(request, answer) => (request, answer),
            StoreCall::FailImport(request, _) => panic!("it failed: {request:?}"),
            _ => panic!("an unexpected call"),
        };
        answer
            .send(Ok(pb::CompleteImportResponse { artifact_id: artifact.to_string() }))
            .expect("the gateway waits");
        request
    }

    async fn fail(&mut self) -> pb::FailImportRequest {
        let StoreCall::FailImport(request, answer) = self.store.next_call().await else {
            panic!("no failure")
        };
        answer.send(Ok(pb::FailImportResponse {})).expect("the gateway waits");
        request
    }

    async fn imported_artifact(&self, what: &WorkerProvided) -> Result<ArtifactId, String> {
        within("the import", self.worker.imports.wait_until_imported(what)).await
    }

    async fn end(self) {
        self.worker.stopping.cancel();
        self.worker.tasks.close();
        within("the end", self.worker.tasks.wait()).await;
        self.store.end().await;
    }
}

fn yours(artifact: ArtifactId, volume: VolumeHandle) -> pb::PrepareImportResponse {
    pb::PrepareImportResponse {
        artifact_id: artifact.to_string(),
        volume_handle: volume.to_string(),
        term: Some(rpc::duration(Duration::from_secs(60))),
    }
}

fn imported(artifact: ArtifactId) -> pb::PrepareImportResponse {
    pb::PrepareImportResponse { term: None, ..yours(artifact, VolumeHandle::new()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn items_are_imported_one_after_the_other() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut provided = conformance::worker_provided(directory.path());
    provided.truncate(2);
    let mut suite = Suite::start(provided.clone()).await;
    for WorkerProvidedPath { what, version, path } in provided {
        let (artifact, volume) = (ArtifactId::new(), VolumeHandle::new());
        let request = suite.begin(artifact, volume).await;
        assert_eq!(request.session_credential, "credential");
        let resource_type = match &what {
            WorkerProvided::ResourceType(name) => name.clone(),
            WorkerProvided::Certs => String::new(),
        };
        assert_eq!(request.provided, Some(pb::WorkerProvided { resource_type, version, path }));
        let complete = suite.complete(artifact).await;
        let held = suite
            .worker
            .transfers
            .manifests
            .scan(&*suite.worker.runtime, volume, "main")
            .await
            .expect("it is there");
        assert_eq!((complete.volume_handle, complete.size_bytes), (volume.to_string(), 8));
        assert_eq!(complete.digest, held.tree_digest().as_bytes()[..]);
        assert_eq!(suite.imported_artifact(&what).await, Ok(artifact));
        let copy = std::fs::read_to_string(suite.machine.path(volume).join("provided"));
        assert_eq!(copy.expect("a copy"), "original");
        let notes = || async { suite.worker.runtime.notes(volume).await.expect("it is there").artifact };
        within("the note", async {
            while notes().await != Some(artifact) {
                tokio::task::yield_now().await
            }
        })
        .await;
    }
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn imported_item_is_not_copied_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let what = git(directory.path()).what;
    let mut suite = Suite::start(vec![git(directory.path())]).await;
    let first = ArtifactId::new();
    let (_, answer) = suite.prepare().await;
    assert_eq!(suite.worker.imports.artifact_of(&what), None);
    answer.send(Ok(imported(first))).expect("the gateway waits");
    assert_eq!(suite.imported_artifact(&what).await, Ok(first));

    // A new session starts another query.
    let next = OpenSession { credential: "next".to_owned(), session: Session(2), ..suite.session.clone() };
    suite.worker.session.set(Some(next));
    let (request, answer) = suite.prepare().await;
    assert_eq!(request.session_credential, "next");
    let second = ArtifactId::new();
    answer.send(Ok(imported(second))).expect("the gateway waits");
    let known = || suite.worker.imports.artifact_of(&what) == Some(second);
    within("the answer", async {
        while !known() {
            tokio::task::yield_now().await
        }
    })
    .await;

    // A lost artifact starts another query.
    assert!(!suite.worker.imports.forget(first), "the artifact is not current");
    assert!(suite.worker.imports.forget(second));
    assert_eq!(suite.worker.imports.artifact_of(&what), None);
    let third = ArtifactId::new();
    let (_, answer) = suite.prepare().await;
    answer.send(Ok(imported(third))).expect("the gateway waits");
    assert_eq!(suite.imported_artifact(&what).await, Ok(third));
    assert_eq!(suite.worker.runtime.list().await.expect("list").volumes, []);
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_import_is_reported_and_tried_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut provided = conformance::worker_provided(directory.path());
    provided.swap(0, 2);
    let (missing, certs) = (provided[0].clone(), provided[1].what.clone());
    provided.truncate(2);
    let mut suite = Suite::start(provided).await;
    let (artifact, volume) = (ArtifactId::new(), VolumeHandle::new());
    suite.begin(artifact, volume).await;
    let report = suite.fail().await;
    assert_eq!(report.volume_handle, volume.to_string());
    assert!(!report.reason.is_empty());
    let of_certs = ArtifactId::new();
    let (request, answer) = suite.prepare().await;
    assert_eq!(request.provided.expect("something").resource_type, "");
    answer.send(Ok(imported(of_certs))).expect("the gateway waits");
    assert_eq!(suite.imported_artifact(&certs).await, Ok(of_certs));

    // The import is tried again after a pause. Each waiting attempt receives the error of a later
    // try.
    suite.begin(artifact, VolumeHandle::new()).await;
    suite.fail().await;
    let worker = suite.worker.clone();
    let again = async {
        loop {
            suite.begin(artifact, VolumeHandle::new()).await;
            suite.fail().await;
        }
    };
    let outcome = tokio::select! {
        outcome = worker.imports.wait_until_imported(&missing.what) => outcome,
        () = within("the failure", again) => panic!("the import does not fail"),
    };
    assert!(outcome.expect_err("the path does not exist").contains("copy a volume"));

    std::fs::create_dir_all(&missing.path).expect("make");
    let again = async {
        suite.begin(artifact, VolumeHandle::new()).await;
        suite.complete(artifact).await;
    };
    let both = async { tokio::join!(worker.imports.wait_until_imported(&missing.what), again) };
    let (outcome, ()) = within("another try", both).await;
    assert_eq!(outcome, Ok(artifact));
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_waits_while_the_store_is_unavailable() {
    let directory = tempfile::tempdir().expect("a directory");
    let what = git(directory.path()).what;
    let mut suite = Suite::start(vec![git(directory.path())]).await;
    let worker = suite.worker.clone();
    let artifact = ArtifactId::new();
    let script = async {
        for reason in [Reason::Unavailable, Reason::StaleSession] {
            let (_, answer) = suite.prepare().await;
            answer
                .send(Err(reason.status("gantry.test", "as the test asked for")))
                .expect("the gateway waits");
        }
        // The claim expired during the copy.
        suite.begin(artifact, VolumeHandle::new()).await;
        let StoreCall::CompleteImport(_, answer) = suite.store.next_call().await else { panic!("no end") };
        answer.send(Err(Reason::ClaimLost.status("gantry.test", "too late"))).expect("the gateway waits");
        suite.begin(artifact, VolumeHandle::new()).await;
        suite.complete(artifact).await;
    };
    let both = async { tokio::join!(worker.imports.wait_until_imported(&what), script) };
    let (outcome, ()) = within("the import", both).await;
    assert_eq!(outcome, Ok(artifact));
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_import_renews_its_claim() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut suite = Suite::start(vec![git(directory.path())]).await;
    let held = suite.machine.faults.hold_volumes();
    let (artifact, volume) = (ArtifactId::new(), VolumeHandle::new());
    let short = pb::PrepareImportResponse {
        term: Some(rpc::duration(Duration::from_millis(30))),
        ..yours(artifact, volume)
    };
    let (first, answer) = suite.prepare().await;
    answer.send(Ok(short.clone())).expect("the gateway waits");
    for _ in 0..3 {
        let (again, answer) = suite.prepare().await;
        assert_eq!(again, first);
        answer.send(Ok(short.clone())).expect("the gateway waits");
    }
    drop(held);
    loop {
        match suite.store.next_call().await {
            StoreCall::PrepareImport(_, answer) => _ = answer.send(Ok(short.clone())),
            StoreCall::CompleteImport(request, answer) => {
                assert_eq!(request.volume_handle, volume.to_string());
                let complete = pb::CompleteImportResponse { artifact_id: artifact.to_string() };
                answer.send(Ok(complete)).expect("the gateway waits");
                break;
            }
            _ => panic!("an unexpected call"),
        }
    }
    suite.end().await;
}
