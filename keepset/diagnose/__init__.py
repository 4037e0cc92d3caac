"""What was kept, and what that says: functions of KeepSets and token ids, and a generation that is watched."""
