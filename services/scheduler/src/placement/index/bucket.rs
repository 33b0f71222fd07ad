//! Ordered lists of equal workers with cheap insertion and removal.
//!
//! A list is split into sorted pieces, so that an insertion moves few entries. Invariant: no piece
//! is empty or longer than [`LONG`], and two neighbours together are longer than [`SHORT`].

use domain::WorkerId;

/// Longest piece. A longer piece is split.
const LONG: usize = 256;

/// Longest sum of two neighbouring pieces that are merged.
const SHORT: usize = 96;

/// Places of workers, ordered by worker id.
#[derive(Debug, Default)]
pub(super) struct Line {
    pieces: Vec<Vec<(WorkerId, usize)>>,
    len: usize,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn first(&self) -> Option<WorkerId> {
        self.pieces.first()?.first().map(|(id, _)| *id)
    }

    /// Returns the places in the order of worker ids.
    pub(super) fn places(&self) -> impl Iterator<Item = &usize> + Clone {
        self.pieces.iter().flatten().map(|(_, place)| place)
    }

    /// Returns the place at this position of the order.
    pub(super) fn nth(&self, mut number: usize) -> Option<usize> {
        for piece in &self.pieces {
            match piece.get(number) {
                Some((_, place)) => return Some(*place),
                None => number -= piece.len(),
            }
        }
        None
    }

    /// Inserts a worker unless it is present.
    pub(super) fn put(&mut self, id: WorkerId, place: usize) {
        let piece = self.piece_of(id);
        let Some(of) = self.pieces.get_mut(piece) else {
            self.pieces.push(vec![(id, place)]);
            self.len = 1;
            return;
        };
        let Err(at) = of.binary_search_by_key(&id, |(id, _)| *id) else { return };
        of.insert(at, (id, place));
        self.len += 1;
        if of.len() > LONG {
            let upper = of.split_off(of.len() / 2);
            self.pieces.insert(piece + 1, upper);
        }
    }

    /// Removes a worker if it is present.
    pub(super) fn take(&mut self, id: WorkerId) {
        let piece = self.piece_of(id);
        let Some(of) = self.pieces.get_mut(piece) else { return };
        let Ok(at) = of.binary_search_by_key(&id, |(id, _)| *id) else { return };
        of.remove(at);
        self.len -= 1;
        let length = |piece: usize| self.pieces.get(piece).map_or(usize::MAX, Vec::len);
        let (own, before) = (length(piece), piece.checked_sub(1));
        if own == 0 {
            self.pieces.remove(piece);
            self.join(piece.checked_sub(1));
        } else if own.saturating_add(length(piece + 1)) <= SHORT {
            self.join(Some(piece));
        } else if before.is_some_and(|before| length(before) + own <= SHORT) {
            self.join(before);
        }
    }

    /// Merges a piece with the next one, if both are short.
    fn join(&mut self, piece: Option<usize>) {
        let Some(piece) = piece.filter(|piece| piece + 1 < self.pieces.len()) else { return };
        if self.pieces[piece].len() + self.pieces[piece + 1].len() <= SHORT {
            let mut next = self.pieces.remove(piece + 1);
            self.pieces[piece].append(&mut next);
        }
    }

    /// Returns the piece that contains the id, or would contain it.
    fn piece_of(&self, id: WorkerId) -> usize {
        let starts_before =
            |piece: &Vec<(WorkerId, usize)>| piece.first().is_some_and(|(first, _)| *first <= id);
        self.pieces.partition_point(starts_before).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    use uuid::Uuid;

    use super::*;

    /// Compares the list with a sorted map, and checks the sizes of pieces, while the list grows
    /// and shrinks.
    #[test]
    fn bucket_equals_a_sorted_map() {
        let mut dice = StdRng::seed_from_u64(7);
        for most in [3_u32, 100, 5_000] {
            let (mut line, mut map) = (Line::default(), BTreeMap::new());
            let mut pieces = 0;
            for step in 0..8 * most {
                // The list grows first, and shrinks in the end.
                let id = WorkerId::from_uuid(Uuid::from_u128(dice.random_range(0..most).into()));
                let puts = dice.random_range(0..8 * most) >= step;
                match (map.contains_key(&id), puts) {
                    (false, true) => {
                        let place = usize::try_from(step).expect("few");
                        line.put(id, place);
                        map.insert(id, place);
                    }
                    (true, false) => {
                        line.take(id);
                        map.remove(&id);
                    }
                    (true, true) => line.put(id, 0),
                    (false, false) => line.take(id),
                }
                pieces = Ord::max(pieces, line.pieces.len());
                assert_eq!((line.len(), line.is_empty()), (map.len(), map.is_empty()));
                assert_eq!(line.first(), map.keys().next().copied());
                let are_right = line.pieces.iter().all(|piece| (1..=LONG).contains(&piece.len()))
                    && line.pieces.windows(2).all(|two| two[0].len() + two[1].len() > SHORT);
                assert!(are_right, "{:?}", line.pieces.iter().map(Vec::len).collect::<Vec<_>>());
            }
            assert!(line.places().eq(map.values()));
            assert_eq!(pieces > 1, most > u32::try_from(LONG).expect("few"));
        }
    }
}
