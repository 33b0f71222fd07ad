//! The fake worker: held to what every runtime is held to, and doing what a test asks of it.

use std::sync::Arc;

use async_trait::async_trait;
use gantry_testing::conformance::Subject;
use gantry_testing::fake::{FakeWorker, SPOOL_BYTES};
use runtime::Runtime;

struct FakeSubject {
    worker: Arc<FakeWorker>,
    runtime: Arc<dyn Runtime>,
}

impl FakeSubject {
    fn of(worker: Arc<FakeWorker>) -> Option<Self> {
        Some(Self { runtime: worker.runtime(), worker })
    }
}

#[async_trait]
impl Subject for FakeSubject {
    fn runtime(&self) -> Arc<dyn Runtime> {
        self.runtime.clone()
    }

    async fn reopen(&mut self) {
        self.runtime = self.worker.runtime();
    }

    fn spool_bytes(&self) -> u64 {
        SPOOL_BYTES
    }
}

mod near {
    use super::{FakeSubject, FakeWorker};

    gantry_testing::runtime_conformance!(FakeSubject::of(FakeWorker::near()));
}

mod far {
    use super::{FakeSubject, FakeWorker};

    gantry_testing::runtime_conformance!(FakeSubject::of(FakeWorker::far()));
}
