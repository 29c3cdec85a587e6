"""The main job: `soli train`, a GPT on real text, written on soli's public interface."""
