//! Memory of frames that were read, for those that come.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// What the connections of a port keep together. Fresh memory would have to be cleared, and taken into the caches, for every
/// frame.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Vec<Vec<u8>>>>);

/// A frame's bytes; their memory goes back when nobody reads them any more.
struct PooledFrame {
    memory: Vec<u8>,
    bytes: usize,
    pool: Pool,
}

impl Pool {
    /// Memory of at least so many bytes, with whatever it has.
    pub(super) fn take(&self, bytes: usize) -> Vec<u8> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.iter().rposition(|memory| memory.len() >= bytes) {
            Some(place) => kept.swap_remove(place),
            None => vec![0; bytes],
        }
    }

    /// The first so many bytes of a frame's memory.
    pub(super) fn freeze(&self, memory: Vec<u8>, bytes: usize) -> Bytes {
        Bytes::from_owner(PooledFrame { memory, bytes, pool: self.clone() })
    }

    /// Keeps the largest ones.
    fn put(&self, memory: Vec<u8>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < POOLED_BUFFERS_MAX {
            kept.push(memory);
        } else if let Some(smallest) = kept.iter_mut().min_by_key(|memory| memory.len())
            && smallest.len() < memory.len()
        {
            *smallest = memory;
        }
    }
}

impl AsRef<[u8]> for PooledFrame {
    fn as_ref(&self) -> &[u8] {
        &self.memory[..self.bytes]
    }
}

impl Drop for PooledFrame {
    fn drop(&mut self) {
        self.pool.put(std::mem::take(&mut self.memory));
    }
}

/// Frames whose memory is kept, of a chunk's length at most each: 16 MiB.
const POOLED_BUFFERS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back() {
        let pool = Pool::default();
        let mut memory = pool.take(100);
        memory.fill(7);
        let frame = pool.freeze(memory, 90);
        let part = frame.slice(10..20);
        assert_eq!(frame[..], [7; 90]);
        drop(frame);
        // Somebody still reads a part of it.
        assert_eq!(pool.take(50), [0; 50]);
        drop(part);
        assert_eq!(pool.take(101), [0; 101]);
        assert_eq!(pool.take(60), [7; 100]);
    }

    #[test]
    fn the_largest_are_kept() {
        let pool = Pool::default();
        for length in 1..=POOLED_BUFFERS_MAX + 2 {
            pool.put(vec![1; length]);
        }
        assert_eq!(pool.0.lock().expect("nobody panics").len(), POOLED_BUFFERS_MAX);
        assert_eq!(pool.take(POOLED_BUFFERS_MAX + 2).len(), POOLED_BUFFERS_MAX + 2);
        assert_eq!(pool.take(POOLED_BUFFERS_MAX + 1).len(), POOLED_BUFFERS_MAX + 1);
        assert_eq!(pool.take(POOLED_BUFFERS_MAX + 1), vec![0; POOLED_BUFFERS_MAX + 1]);
    }
}
