//! Counters of the contents that cross the network.

/// Direction of a transfer, as seen from the worker.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Direction {
    In,
    Out,
}

impl Direction {
    pub(crate) const ALL: [Self; 2] = [Self::In, Self::Out];

    /// Returns the value of the label `direction`.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
        }
    }
}

/// Counts the contents of a message. `content` is their size, and `wire` the size on the network.
pub(crate) fn record(direction: Direction, content: u64, wire: u64) {
    let direction = direction.label();
    metrics::counter!("gantry_gateway_transferred_bytes_total", "direction" => direction).increment(content);
    metrics::counter!("gantry_gateway_wire_bytes_total", "direction" => direction).increment(wire);
}
