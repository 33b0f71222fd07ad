//! Random and mutated bytes for parser tests. Each input is derived from the number of a case.
//!
//! `GANTRY_SEED` repeats one case. `GANTRY_SOAK` runs new cases for this many hours (`make fuzz`).

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::seeds;

/// A random generator that is seeded with the number of a case (SplitMix64).
#[derive(Debug)]
pub struct Draws(u64);

impl Draws {
    /// A random number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^ (number >> 31)
    }

    /// A random number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end.max(1)).unwrap_or(u64::MAX);
        usize::try_from(self.number() % end).unwrap_or_default()
    }

    /// A random byte.
    pub fn byte(&mut self) -> u8 {
        self.number().to_le_bytes()[0]
    }

    /// A random UUID.
    pub fn uuid(&mut self) -> Uuid {
        Uuid::from_u64_pair(self.number(), self.number())
    }

    /// A random text of up to `most` characters, with characters that encodings treat specially.
    pub fn text(&mut self, most: usize) -> String {
        const CHARACTERS: [char; 12] = ['a', 'Z', '7', '=', '"', '\\', '\n', ' ', 'é', '€', '😀', '\u{1}'];
        (0..self.below(most + 1)).map(|_| CHARACTERS[self.below(CHARACTERS.len())]).collect()
    }

    /// A mutation of `valid`. One of eight cases is random bytes.
    pub fn changed(&mut self, valid: &[u8]) -> Vec<u8> {
        if self.below(8) == 0 {
            return (0..self.below(300)).map(|_| self.byte()).collect();
        }
        let mut bytes = valid.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            let length = self.below(40).min(bytes.len() - at);
            match self.below(8) {
                0 if !bytes.is_empty() => bytes[at] = self.byte(),
                1 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                2 => drop(bytes.drain(at..at + length)),
                3 => bytes.truncate(at),
                4 => {
                    let piece = bytes[at..at + length].to_vec();
                    let to = self.below(bytes.len());
                    bytes.splice(to..to, piece);
                }
                // Large numbers in several encodings.
                5 => drop(bytes.splice(at..at, [0xff, 0xff, 0xff, 0xff, 0x7f])),
                6 => bytes[at..at + length].fill(b'9'),
                // Nesting deeper than a recursive parser can follow.
                _ => drop(bytes.splice(at..at, std::iter::repeat_n(b'[', 1 + self.below(2000)))),
            }
        }
        bytes
    }
}

/// Runs `check` for `cases` cases, or for as long as `GANTRY_SOAK` says. Prints the case that
/// failed.
pub fn each(cases: u64, mut check: impl FnMut(&mut Draws)) {
    struct CasePrinter(u64);
    impl Drop for CasePrinter {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("GANTRY_SEED={}", self.0);
            }
        }
    }
    let mut one = |case| {
        let _says = CasePrinter(case);
        check(&mut Draws(case));
    };
    if let Some(case) = seeds::repeated() {
        return one(case);
    }
    (0..cases).for_each(&mut one);
    if let Some(hours) = seeds::setting("GANTRY_SOAK") {
        let until = Instant::now() + Duration::from_secs(hours * 3600);
        (cases..).take_while(|_| Instant::now() < until).for_each(one);
    }
}

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

/// The system allocator with a count of allocated bytes per thread. For test binaries.
#[derive(Debug)]
pub struct Counting;

/// Runs `parse`, and returns the peak of bytes that this thread had allocated meanwhile. The peak
/// is 0 if [`Counting`] is not the allocator.
pub fn most_allocated<T>(parse: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATED.get();
    MOST.set(before);
    let parsed = parse();
    (parsed, MOST.get().wrapping_sub(before))
}

fn count(freed: usize, allocated: usize) {
    // A thread that ends does not count any more. This thread may free bytes that another thread
    // allocated, so the count may be negative.
    _ = ALLOCATED.try_with(|bytes| {
        bytes.set(bytes.get().wrapping_add(allocated).wrapping_sub(freed));
        MOST.try_with(|most| {
            if bytes.get().wrapping_sub(most.get()).cast_signed() > 0 {
                most.set(bytes.get());
            }
        })
    });
}

// SAFETY: all calls are forwarded to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, bytes: *mut u8, layout: Layout) {
        count(layout.size(), 0);
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { System.dealloc(bytes, layout) }
    }

    unsafe fn realloc(&self, bytes: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(layout.size(), size);
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { System.realloc(bytes, layout, size) }
    }
}
